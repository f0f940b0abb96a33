"""Whole runs with true servers: the demonstration's config for a few steps, as the documentation says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def areal(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "areal_core", *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


def transitions(run_dir, server):
    path = run_dir / "logs" / "servers.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [(entry["state"], entry["version"]) for entry in entries if entry["server"] == server]


@pytest.mark.parametrize(("server", "transport"), [("sglang", "broadcast"), ("vllm", "memory")])
def test_the_demonstration_with_a_server(server, transport, request, tmp_path):
    program = request.getfixturevalue(f"{server}_program")
    run_dir = tmp_path / "run"
    words = [f"publication.transport={transport}", "publication.verify_every=1", "steps=5", "evaluation=null"]
    words += [f"inference_engine.program=[{','.join(map(str, program))}]", "report=false", f"run_dir={run_dir}"]
    found = areal("run", f"examples/servers_on_cpu/{server}.yaml", *words)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["verify/logprob_difference_max"] < 1e-3 for step in steps), "the server holds other weights"
    assert all(step["publish/transfer_s"] > 0 for step in steps[1:])
    assert sum(step["servers/failed"] for step in steps if "servers/failed" in step) == 0
    assert areal("audit", run_dir).returncode == 0
    assert [state for state, _ in transitions(run_dir, "server-0")] == ["catching up", "ready"]


def test_an_option_that_the_server_does_not_know_ends_the_run_in_its_words(sglang_program, tmp_path):
    words = ["inference_engine.options.no_such_option=1", f"run_dir={tmp_path / 'run'}", "steps=2", "evaluation=null"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    found = areal("run", "examples/servers_on_cpu/sglang.yaml", *words)
    assert found.returncode == 1
    assert "--no-such-option" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.long
def test_a_server_joins_outlives_a_killed_run_and_is_found_again(sglang_program, tmp_path):
    run_dir, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    program = f"inference_engine.program=[{','.join(map(str, sglang_program))}]"
    words = ["run", "examples/servers_on_cpu/sglang.yaml", program, "steps=60", "evaluation=null", "report=false"]
    start = [sys.executable, "-m", "areal_core"]
    quiet = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*start, *words, "checkpoint.every=2", f"run_dir={run_dir}"], **quiet)
    server = None
    try:
        wait_for(lambda: len(transitions(run_dir, "server-0")) == 2, 150, "the start of the run's own server")
        server = subprocess.Popen([*start, "serve", "--run", run_dir, "--name", "extra"], **quiet)
        wait_for(lambda: transitions(run_dir, "extra")[-1:] and transitions(run_dir, "extra")[-1][0] == "ready", 90,
                 "the joining of the second server")  # fmt: skip
        assert transitions(run_dir, "extra")[-1][1] >= 0
        wait_for(lambda: (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").glob("step-*")), 60,
                 "a checkpoint")  # fmt: skip
        run.kill()
        run.wait()
        assert server.poll() is None
        before = len(transitions(run_dir, "extra"))
        step = len((run_dir / "metrics.jsonl").read_text().splitlines())
        found = areal("run", "--resume", run_dir, f"steps={step + 4}")
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
        again = transitions(run_dir, "extra")[before:]
        assert ("ready", again[-1][1]) in again, again
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert areal("audit", run_dir).returncode == 0
    finally:
        for process in (run, server):
            if process is not None and process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sampling.stop=[x]"], "set detokenize to true"),
        (["placement.generation=[0]", "placement.training=[0]"], "memory_saver"),
        (["inference_engine.servers=0"], "there is no server"),
        (["inference_engine.addresses=[localhost:80]"], "http://host:port"),
        (["deterministic=true"], "embedded engine"),
        (["placement.generation=[0,1]", "placement.training=[1,2]"], "all of them must be shared"),
        (["inference_engine.min_servers=3"], "fewer servers"),
    ],
)
def test_wrong_configs_are_refused_without_starting_anything(words, told, tmp_path):
    found = areal("run", "examples/servers_on_cpu/sglang.yaml", f"run_dir={tmp_path / 'run'}", *words)
    assert found.returncode == 2
    assert told in found.stderr
    assert not (tmp_path / "run").exists()


def test_serve_refuses_what_cannot_be_served(tmp_path):
    found = areal("serve", "--plugins", "grpo")
    assert found.returncode == 2
    assert "there is no server to start" in found.stderr
    found = areal("serve", "examples/servers_on_cpu/sglang.yaml", "--host", "0.0.0.0")
    assert found.returncode == 2
    assert "api_key" in found.stderr
    found = areal("serve", "--run", tmp_path)
    assert found.returncode == 2
