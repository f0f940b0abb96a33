"""Servers of runs that outlive a trainer, are reached by others, come with machines, and are killed at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from areal_core.disk import read_lines
from areal_core.runtime.process_tree import children, kill_tree
from tests.servers.run_parts import CONFIGS, ENVIRONMENT, HANG_S, ROOT, START, areal, end, transitions, wait_for

pytestmark = [pytest.mark.servers, pytest.mark.timeout(2 * HANG_S)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "placed",
    [
        ["weight_sync.transport=broadcast"],
        ["placement={generation: [0], training: [0]}", "model.dtype=float32"],
    ],
    ids=["apart", "on the trainer's GPU, with its memory"],
)
def test_servers_outlive_a_trainer_that_is_killed(placed, sglang_program, tmp_path):
    """The same process goes on with the weights that the run goes back to."""
    run_dir, log = tmp_path / "run", tmp_path / "out"
    words = [*placed, "weight_sync.logprob_check_every=1", "steps=8", "evaluation=null"]
    words += ["checkpoint.every=1", "inference_engine.health_timeout_s=120"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]", f"run_dir={run_dir}"]
    with log.open("w") as out:
        command = [*START, "run", f"{CONFIGS}/sglang.yaml", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=out)
    wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 3, process, "three steps")
    os.kill(processes_of(run_dir)["trainer-0"]["pid"], signal.SIGKILL)
    assert process.wait(HANG_S) == 0, log.read_text()[-3000:]
    assert len(list((run_dir / "attempts").iterdir())) == 2
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(1, 9))
    states = [state for state, _ in transitions(run_dir, "server-0")]
    assert states.count("ready") == 2, states
    assert (run_dir / "logs" / "server-0.log").read_text(errors="replace").count("server_args=") == 1
    assert areal("audit", run_dir).returncode == 0


def processes_of(run_dir):
    """What `areal status` says of the processes of a run, by name."""
    return json.loads(areal("status", run_dir, "--json").stdout)["processes"]


def outward_address():
    """Of this machine in a network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


OUTWARD = """\
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.settings import LocalSettings


class Outward(LocalLauncher):
    Config = LocalSettings
    host = "{host}"
"""


@pytest.mark.skipif(outward_address().startswith("127."), reason="this machine has no address but loopback")
@pytest.mark.nightly
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
        key, file = (run_dir / "servers/key").read_text(), run_dir / "servers/key"
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
    assert {path.name for path in files} <= {"key", "server-0.log"}, "SGLang writes its settings into its log"
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert areal("audit", run_dir).returncode == 0


@pytest.mark.nightly
def test_a_server_comes_with_a_machine_and_goes_with_it(sglang_program, tmp_path):
    """The machine comes late and is lost; the run loses nothing, not even an attempt."""
    run_dir = tmp_path / "run"
    words = ["launcher={type: external, nodes: 1, host: 127.0.0.1}", "placement.training=[0]", "model.dtype=float32"]
    words += ["inference_engine.servers={minimum: 1, maximum: 2}", "steps=100000", "evaluation=null"]
    words += ["inference_engine.health_timeout_s=120", "weight_sync.transport=memory", f"run_dir={run_dir}"]
    words += [f"inference_engine.program=[{','.join(map(str, sglang_program))}]"]
    command = [*START, "run", f"{CONFIGS}/sglang.yaml", *words]
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    first = late = None
    try:
        wait_for((run_dir / "attempts" / "1").exists, run, "the run folder")
        first = machine(run_dir, "first", "0,1")
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, run, "two steps")
        assert transitions(run_dir, "server-1")[-1][0] == "waiting for room"
        late = machine(run_dir, "late", "0")
        wait_for(lambda: transitions(run_dir, "server-1")[-1][0] == "ready", run, "the server on the new machine")
        steps = len(read_lines(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) > steps + 3, run, "steps with both")
        assert processes_of(run_dir)["server-1"]["host"] == "late"
        kill_tree(late.pid)
        late.wait()
        wait_for(lambda: transitions(run_dir, "server-1")[-1][0] == "waiting for room", run, "it waits for room again")
        steps = len(read_lines(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) > steps + 3, run, "steps without it")
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
    finally:
        end(run, first, late)
    lines = read_lines(run_dir / "metrics.jsonl")
    assert max(line["servers/ready"] for line in lines) == 2
    assert max(line["servers/ready"] for line in lines[-3:]) == 1, "none counts while weights change"
    assert sum(line.get("episodes/failed", 0) for line in lines) == 0
    assert len(list((run_dir / "attempts").iterdir())) == 1
    assert areal("audit", run_dir).returncode == 0


def machine(run_dir, name, gpus):
    """The agent of a machine that says it has GPUs; on a machine without any nobody looks."""
    environment = ENVIRONMENT | {"AREAL_NODE": name, "CUDA_VISIBLE_DEVICES": gpus}
    return subprocess.Popen([*START, "node", run_dir], cwd=ROOT, env=environment)


@pytest.mark.nightly
def test_a_server_that_is_killed_at_any_moment_is_started_again_and_its_orphans_end(sglang_program, tmp_path):
    """Its program and its role, while it loads, generates, or takes weights over; the run needs no other attempt."""
    run_dir, chance = tmp_path / "run", random.Random(0)
    words = [f"inference_engine.program=[{','.join(map(str, sglang_program))}]", "steps=100000", "evaluation=null"]
    words += ["inference_engine.health_timeout_s=120", "inference_engine.restarts=99", f"run_dir={run_dir}"]
    command = [*START, "run", f"{CONFIGS}/sglang.yaml", *words]
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, run, "two steps")
        for number in range(6):
            was = len([state for state, _ in transitions(run_dir, "server-0") if state == "ready"])
            time.sleep(3 * chance.random())
            role = processes_of(run_dir)["server-0"]["pid"]
            (program,) = children(role)
            below = [program, *children(program)]
            os.kill([program, role][number % 2], signal.SIGKILL)
            wait_for(lambda all=below: not any(is_alive(pid) for pid in all), run, "the end of all that it started")
            if number % 3:
                time.sleep(2 * chance.random())
                wait_for(lambda: "server-0" in processes_of(run_dir), run, "the next one")
                loading = processes_of(run_dir)["server-0"]["pid"]
                if loading:
                    os.kill(loading, signal.SIGKILL)
            wait_for(
                lambda n=was: len([s for s, _ in transitions(run_dir, "server-0") if s == "ready"]) > n,
                run,
                "it serves again",
            )
            steps = len(read_lines(run_dir / "metrics.jsonl"))
            wait_for(lambda n=steps: len(read_lines(run_dir / "metrics.jsonl")) > n + 1, run, "further steps")
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
    finally:
        end(run)
    lines = read_lines(run_dir / "metrics.jsonl")
    assert sum(line.get("episodes/failed", 0) for line in lines) == 0
    assert len(list((run_dir / "attempts").iterdir())) == 1
    assert areal("audit", run_dir).returncode == 0


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
