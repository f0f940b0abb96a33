"""Whole runs with true servers: the demonstration's config for a few steps, as the documentation says."""

from __future__ import annotations

import signal
import subprocess

import pytest

from areal_core.disk import read_lines
from tests.servers.run_parts import CONFIGS, ENVIRONMENT, HANG_S, ROOT, START, areal, end, transitions, wait_for

pytestmark = [pytest.mark.servers, pytest.mark.timeout(2 * HANG_S)]


@pytest.mark.parametrize(
    ("server", "transport"), [("sglang", "broadcast"), pytest.param("vllm", "memory", marks=pytest.mark.nightly)]
)
def test_the_demonstration_with_a_server(server, transport, request, tmp_path, monkeypatch):
    """Servers that ask for a key; nothing of it is left in the run's folder but in their logs."""
    program = request.getfixturevalue(f"{server}_program")
    run_dir, key = tmp_path / "run", "a-key-for-the-servers-of-this-test"
    monkeypatch.setitem(ENVIRONMENT, "SERVERS_KEY", key)
    words = [f"weight_sync.transport={transport}", "weight_sync.logprob_check_every=1", "steps=5", "evaluation=null"]
    words += ["inference_engine.health_timeout_s=120"]  # that a busy machine is late shall lose nothing here
    words += [f"inference_engine.program=[{','.join(map(str, program))}]", f"run_dir={run_dir}"]
    found = areal("run", f"{CONFIGS}/{server}.yaml", "inference_engine.api_key=env:SERVERS_KEY", *words)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    files = [path for path in run_dir.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert {path.name for path in files} <= {"server-0.log"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    steps = read_lines(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["logprob_check/difference_max"] < 1e-3 for step in steps), "the server holds other weights"
    assert all(step["weight_sync/transfer_s"] > 0 for step in steps[1:])
    assert sum(step["servers/failed"] for step in steps if "servers/failed" in step) == 0
    assert areal("audit", run_dir).returncode == 0
    assert [state for state, _ in transitions(run_dir, "server-0")] == ["syncing", "ready"]


@pytest.mark.nightly
def test_servers_that_keep_their_memory_generate_while_the_same_gpu_trains(sglang_program, tmp_path):
    run_dir = tmp_path / "run"
    words = ["placement={generation: [0, 0], training: [0]}", "inference_engine.servers=2", "model.dtype=float32"]
    words += ["steps=6", "evaluation=null", f"run_dir={run_dir}", "weight_sync.logprob_check_every=1"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]", "rollout.max_staleness=1"]
    found = areal("run", f"{CONFIGS}/sglang.yaml", *words)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    steps = read_lines(run_dir / "metrics.jsonl")
    assert max(step["staleness/mean"] for step in steps) > 0.5, "they waited while it trained"
    assert not any("time/sleep_s" in step for step in steps)
    assert all(step["logprob_check/difference_max"] < 1e-3 for step in steps), "a server holds other weights"
    assert areal("audit", run_dir).returncode == 0
    ready = [[state for state, _ in transitions(run_dir, f"server-{number}")] for number in (0, 1)]
    assert ready == [["syncing", "ready"]] * 2


@pytest.mark.nightly
def test_an_option_that_the_server_does_not_know_ends_the_run_in_its_words(sglang_program, tmp_path):
    words = ["inference_engine.options.no_such_option=1", f"run_dir={tmp_path / 'run'}", "steps=2", "evaluation=null"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    found = areal("run", f"{CONFIGS}/sglang.yaml", *words)
    assert found.returncode == 1
    assert "--no-such-option" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        pytest.param("inference_engine.start_timeout_s=1", "raise start_timeout_s", marks=pytest.mark.nightly),
        ("training.phase_timeout_s=6", "raise training.phase_timeout_s"),
    ],
)
def test_a_start_that_takes_too_long_ends_with_the_setting_that_says_so(sglang_program, setting, told, tmp_path):
    words = [setting, f"run_dir={tmp_path / 'run'}", "steps=2", "evaluation=null"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    found = areal("run", f"{CONFIGS}/sglang.yaml", *words)
    assert found.returncode == 1
    assert told in found.stderr, found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.nightly
def test_a_server_joins_outlives_a_killed_run_and_is_found_again(sglang_program, tmp_path):
    run_dir, told = tmp_path / "run", tmp_path / "serve.txt"
    program = f"inference_engine.program=[{','.join(map(str, sglang_program))}]"
    words = ["run", f"{CONFIGS}/sglang.yaml", program, "steps=60", "evaluation=null"]
    quiet = {"cwd": ROOT, "env": ENVIRONMENT, "stderr": subprocess.DEVNULL}
    words += ["checkpoint.every=2", f"run_dir={run_dir}"]
    run = subprocess.Popen([*START, *words], stdout=subprocess.DEVNULL, **quiet)
    server = None
    try:
        wait_for(lambda: len(transitions(run_dir, "server-0")) == 2, run, "the start of the run's own server")
        with told.open("w") as output:
            serve = [*START, "serve", "--join", run_dir, "--name", "extra"]
            server = subprocess.Popen(serve, stdout=output, **quiet)
        wait_for(lambda: "in use by the run" in told.read_text(), server, "the joining of the second server")
        assert transitions(run_dir, "extra")[-1][0] == "ready"
        wait_for(lambda: any(run_dir.glob("attempts/*/checkpoints/step-*")), run, "a checkpoint")
        run.kill()
        run.wait()
        wait_for(lambda: "the server waits" in told.read_text(), server, "the end of the run is told")
        before = len(transitions(run_dir, "extra"))
        step = len(read_lines(run_dir / "metrics.jsonl"))
        found = areal("run", "--resume", run_dir, f"steps={step + 4}")
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
        again = transitions(run_dir, "extra")[before:]
        assert "ready" in [state for state, _ in again], again
        assert told.read_text().count("in use by the run") == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
        assert areal("audit", run_dir).returncode == 0
    finally:
        end(run, server)


@pytest.mark.nightly
def test_a_server_leaves_a_run_that_goes_on_and_a_name_that_is_taken_is_refused(sglang_program, tmp_path):
    run_dir, told = tmp_path / "run", tmp_path / "serve.txt"
    program = f"inference_engine.program=[{','.join(map(str, sglang_program))}]"
    words = ["run", f"{CONFIGS}/sglang.yaml", program, "steps=100000", "evaluation=null"]
    quiet = {"cwd": ROOT, "env": ENVIRONMENT, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*START, *words, f"run_dir={run_dir}"], stdout=subprocess.DEVNULL, **quiet)
    server = None
    try:
        wait_for(lambda: len(transitions(run_dir, "server-0")) == 2, run, "the start of the run's own server")
        clash = areal("serve", "--join", run_dir, "--name", "server-0")
        assert clash.returncode == 1
        assert "the run has a server server-0 at http://127.0.0.1:" in clash.stderr
        assert transitions(run_dir, "server-0")[-1][0] == "ready", "the one that was there goes on"
        with told.open("w") as output:
            serve = [*START, "serve", "--join", run_dir, "--name", "extra"]
            server = subprocess.Popen(serve, stdout=output, **quiet)
        wait_for(lambda: "in use by the run" in told.read_text(), server, "the joining of the second server")
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
        assert [state for state, _ in transitions(run_dir, "extra")][-2:] == ["leaving", "gone"]
        steps = len(read_lines(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) > steps + 2, run, "further steps")
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
        assert areal("audit", run_dir).returncode == 0
    finally:
        end(run, server)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sampling.stop=[x]"], "set detokenize to true"),
        (["inference_engine.options.host=0.0.0.0"], "options.host: areal tells servers that itself"),
        (["inference_engine.options.model-path=x"], "options.model_path: areal tells servers that itself"),
        (["inference_engine.servers=0"], "there is no server"),
        (["inference_engine.addresses=[localhost:80]"], "http://host:port"),
        (["deterministic=true"], "embedded engine"),
        (["placement.generation=[0,1]", "placement.training=[1,2]"], "share all of them, or none"),
        (
            ["inference_engine.servers={minimum: 3, maximum: 2}"],
            "minimum is 3, and servers.maximum is 2, with 0",
        ),
        (["inference_engine.servers={minimum: 1, maximum: 99999999999}"], "inference_engine.servers.maximum"),
        (["inference_engine.servers=true"], "servers"),
        (["placement.generation=[0]", "placement.training=[0]", "inference_engine.servers.maximum=2"], "of their own"),
    ],
)
def test_wrong_configs_are_refused_without_starting_anything(words, told, tmp_path):
    found = areal("run", f"{CONFIGS}/sglang.yaml", f"run_dir={tmp_path / 'run'}", *words)
    assert found.returncode == 2
    assert told in found.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plugins", "grpo"], "there is no server to start"),
        ([f"{CONFIGS}/sglang.yaml", "--host", "0.0.0.0"], "api_key"),
        ([f"{CONFIGS}/sglang.yaml"], "the model is made when a run starts"),
        ([f"{CONFIGS}/sglang.yaml", "--gpus", "a"], "--gpus"),
        (["--join", "tests"], "is not a run folder"),
        ([f"{CONFIGS}/sglang.yaml", "--join", "tests"], "CONFIG cannot be named as well"),
    ],
)
def test_serve_refuses_what_cannot_be_served(words, told):
    found = areal("serve", *words)
    assert found.returncode == 2
    assert told in found.stderr
