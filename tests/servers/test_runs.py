"""Whole runs with true servers: the demonstration's config for a few steps, as the documentation says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from areal_core.launchers.identity import processes_with
from areal_core.messages import Credentials

ROOT = Path(__file__).parents[2]
CONFIGS = "tests/servers_on_cpu"
START = [sys.executable, "-m", "areal_core"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
HANG_S = 900
"""A wait that is longer has no end; everything here takes seconds or a minute."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_S)]


def areal(*words):
    return subprocess.run(
        [*START, *map(str, words)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def wait_for(condition, process, what):
    """Until something is so; whoever is to bring it about must live."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert process.poll() is None, f"it ended with exit code {process.poll()} before: {what}"
        assert time.monotonic() < deadline, f"waited {HANG_S} s in vain for: {what}"
        time.sleep(0.2)


def transitions(run_dir, server):
    path = run_dir / "logs" / "servers.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [(entry["state"], entry["version"]) for entry in entries if entry["server"] == server]


@pytest.mark.parametrize(
    ("server", "transport"), [("sglang", "broadcast"), pytest.param("vllm", "memory", marks=pytest.mark.long)]
)
def test_the_demonstration_with_a_server(server, transport, request, tmp_path, monkeypatch):
    """Servers that ask for a key; nothing of it is left in the run's folder but in their logs."""
    program = request.getfixturevalue(f"{server}_program")
    run_dir, key = tmp_path / "run", "a-key-for-the-servers-of-this-test"
    monkeypatch.setitem(ENVIRONMENT, "SERVERS_KEY", key)
    words = [f"publication.transport={transport}", "publication.verify_every=1", "steps=5", "evaluation=null"]
    words += ["inference_engine.health_timeout_s=120"]  # that a busy machine is late shall lose nothing here
    words += [f"inference_engine.program=[{','.join(map(str, program))}]", f"run_dir={run_dir}"]
    found = areal("run", f"{CONFIGS}/{server}.yaml", "inference_engine.api_key=env:SERVERS_KEY", *words)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    files = [path for path in run_dir.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert {path.name for path in files if not path.match("key-*.yaml")} <= {"server-0.log"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
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
    found = areal("run", f"{CONFIGS}/sglang.yaml", *words)
    assert found.returncode == 1
    assert "--no-such-option" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        pytest.param(
            "inference_engine.start_timeout_s=1", "start_timeout_s how long it waits for them", marks=pytest.mark.long
        ),
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


@pytest.mark.long
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
            serve = [*START, "serve", "--run", run_dir, "--name", "extra"]
            server = subprocess.Popen(serve, stdout=output, **quiet)
        wait_for(lambda: "in use by the run" in told.read_text(), server, "the joining of the second server")
        assert transitions(run_dir, "extra")[-1][0] == "ready"
        wait_for(lambda: any(run_dir.glob("epochs/*/checkpoints/step-*")), run, "a checkpoint")
        run.kill()
        run.wait()
        wait_for(lambda: "the server waits" in told.read_text(), server, "the end of the run is told")
        before = len(transitions(run_dir, "extra"))
        step = len((run_dir / "metrics.jsonl").read_text().splitlines())
        found = areal("run", "--resume", run_dir, f"steps={step + 4}")
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
        again = transitions(run_dir, "extra")[before:]
        assert "ready" in [state for state, _ in again], again
        assert told.read_text().count("in use by the run") == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
        assert areal("audit", run_dir).returncode == 0
    finally:
        for process in (run, server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.long
def test_a_server_leaves_a_run_that_goes_on_and_a_name_that_is_taken_is_refused(sglang_program, tmp_path):
    run_dir, told = tmp_path / "run", tmp_path / "serve.txt"
    program = f"inference_engine.program=[{','.join(map(str, sglang_program))}]"
    words = ["run", f"{CONFIGS}/sglang.yaml", program, "steps=100000", "evaluation=null"]
    quiet = {"cwd": ROOT, "env": ENVIRONMENT, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*START, *words, f"run_dir={run_dir}"], stdout=subprocess.DEVNULL, **quiet)
    server = None
    try:
        wait_for(lambda: len(transitions(run_dir, "server-0")) == 2, run, "the start of the run's own server")
        clash = areal("serve", "--run", run_dir, "--name", "server-0")
        assert clash.returncode == 1
        assert "the run has a server server-0 at http://127.0.0.1:" in clash.stderr
        assert transitions(run_dir, "server-0")[-1][0] == "ready", "the one that was there goes on"
        with told.open("w") as output:
            serve = [*START, "serve", "--run", run_dir, "--name", "extra"]
            server = subprocess.Popen(serve, stdout=output, **quiet)
        wait_for(lambda: "in use by the run" in told.read_text(), server, "the joining of the second server")
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
        assert [state for state, _ in transitions(run_dir, "extra")][-2:] == ["leaving", "gone"]
        steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
        wait_for(lambda: len((run_dir / "metrics.jsonl").read_text().splitlines()) > steps + 2, run, "further steps")
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
        assert areal("audit", run_dir).returncode == 0
    finally:
        for process in (run, server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sampling.stop=[x]"], "set detokenize to true"),
        (["placement.generation=[0]", "placement.training=[0]"], "memory_saver"),
        (["inference_engine.servers=0"], "there is no server"),
        (["inference_engine.addresses=[localhost:80]"], "http://host:port"),
        (["deterministic=true"], "embedded engine"),
        (["placement.generation=[0,1]", "placement.training=[1,2]"], "all of them must be shared"),
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
        (["--run", "tests"], "is no run folder"),
        ([f"{CONFIGS}/sglang.yaml", "--run", "tests"], "CONFIG cannot be named as well"),
    ],
)
def test_serve_refuses_what_cannot_be_served(words, told):
    found = areal("serve", *words)
    assert found.returncode == 2
    assert told in found.stderr


@pytest.mark.long
def test_servers_outlive_a_trainer_that_is_killed(sglang_program, tmp_path):
    """On another node than the trainer: the same process goes on with the weights that the run goes back to."""
    run_dir, log = tmp_path / "run", tmp_path / "out"
    words = ["publication.transport=broadcast", "publication.verify_every=1", "steps=8", "evaluation=null"]
    words += ["checkpoint.every=1", "launcher.nodes=2", "inference_engine.health_timeout_s=120"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]", f"run_dir={run_dir}"]
    with log.open("w") as out:
        command = [*START, "run", f"{CONFIGS}/sglang.yaml", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=out)
    wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 3, process, "three steps")
    token = (run_dir / "epochs" / "000001" / "token").read_text()
    trainer = set(processes_with("AREAL_PROCESS", "trainer-0")) & set(processes_with("AREAL_TOKEN", token))
    os.kill(min(trainer), signal.SIGKILL)
    assert process.wait(HANG_S) == 0, log.read_text()[-3000:]
    assert "going back to the last checkpoint" in log.read_text()
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(1, 9))
    states = [state for state, _ in transitions(run_dir, "server-0")]
    assert states.count("ready") == 2, states
    assert (run_dir / "logs" / "server-0.log").read_text(errors="replace").count("server_args=") == 1
    assert areal("audit", run_dir).returncode == 0


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def outward_address():
    """Of this machine in a network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


OUTWARD = """\
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings


class Outward(LocalLauncher):
    Config = LocalSettings
    host = "{host}"
"""


@pytest.mark.skipif(outward_address().startswith("127."), reason="this machine has no address but loopback")
def test_servers_that_others_can_reach_ask_for_a_key_of_the_runs_own(sglang_program, tmp_path):
    """No word about keys in the config, and nodes that are reached by an address of the network."""
    run_dir, launcher = tmp_path / "run", tmp_path / "outward.py"
    host = outward_address()
    launcher.write_text(OUTWARD.replace("{host}", host))
    words = [f"launcher={{type: '{launcher}:Outward'}}", "steps=100000", "evaluation=null", f"run_dir={run_dir}"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    run = subprocess.Popen(
        [*START, "run", f"{CONFIGS}/sglang.yaml", *words], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, run, "two steps")
        key, file = (run_dir / "servers.key").read_text(), run_dir / "servers.key"
        assert file.stat().st_mode & 0o777 == 0o600
        log = (run_dir / "logs" / "server-0.log").read_text(errors="replace")
        port = re.search(r"running on http://\S+?:(\d+)", log, re.IGNORECASE)
        assert port, log[-2000:]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{host}:{port[1]}/server_info", timeout=60)
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    files = [path for path in run_dir.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    told = {path.name for path in files if not path.match("key-*.yaml")}
    assert told <= {"servers.key", "server-0.log"}, "SGLang writes its settings into its log"
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert areal("audit", run_dir).returncode == 0


@pytest.mark.long
def test_a_server_comes_with_a_node_and_goes_with_it(sglang_program, tmp_path):
    """The node comes late and is told to go; the run loses nothing, not even an epoch."""
    run_dir = tmp_path / "run"
    words = ["inference_engine.servers={minimum: 1, maximum: 2}", "steps=100000", "evaluation=null"]
    words += ["inference_engine.health_timeout_s=120", f"run_dir={run_dir}"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    command = [*START, "run", f"{CONFIGS}/sglang.yaml", *words]
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    node = None
    try:
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, run, "two steps")
        assert transitions(run_dir, "server-1")[-1][0] == "waiting for room"
        epoch = run_dir / "epochs" / "000001"
        told = Credentials((epoch / "token").read_text(), 1).as_environment() | {"AREAL_NODE": "late"}
        address = json.loads((epoch / "owner.json").read_text())["address"]
        warden = [sys.executable, "-m", "areal_core.launchers.warden", address, "60"]
        node = subprocess.Popen(warden, env=ENVIRONMENT | told)
        wait_for(lambda: transitions(run_dir, "server-1")[-1][0] == "ready", run, "the server on the new node")
        steps = len(read_lines(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) > steps + 3, run, "steps with both")
        assert json.loads(areal("status", run_dir, "--json").stdout)["processes"]["server-1"]["node"] == "late"
        node.send_signal(signal.SIGTERM)
        assert node.wait(HANG_S) == 0
        wait_for(lambda: transitions(run_dir, "server-1")[-1][0] == "waiting for room", run, "it waits for room again")
        steps = len(read_lines(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) > steps + 3, run, "steps without it")
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
    finally:
        for process in (run, node):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    lines = read_lines(run_dir / "metrics.jsonl")
    assert max(line["servers/ready"] for line in lines) == 2
    assert max(line["servers/ready"] for line in lines[-3:]) == 1, "none counts while weights change"
    assert sum(line.get("episodes/failed", 0) for line in lines) == 0
    assert len(list((run_dir / "epochs").iterdir())) == 1
    assert areal("audit", run_dir).returncode == 0
