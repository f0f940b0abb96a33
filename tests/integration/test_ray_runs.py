"""Runs on a true Ray cluster of three virtual nodes, which lose processes and nodes, and as jobs of the cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from areal_core.driver import ask_driver
from areal_core.runs import RunFolder
from areal_core.runtime.messages import StatusRequest
from areal_core.runtime.process_tree import processes_with

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-ray[ray]'")

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RayCluster, Workplace

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="virtual nodes are process namespaces: they need Linux, root and unshare",
    ),
]
HANG_S = 300


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S} s: {what}"
        time.sleep(0.05)


def run_words(cluster: RayCluster, nodes: int = 2) -> list[str]:
    """`areal run`, on the cluster."""
    return ["run", "run.yaml", "run_dir=run", f"launcher.address={cluster.address}", f"launcher.host={cluster.host}",
            "launcher.type=ray", f"launcher.nodes={nodes}", "launcher.trainer_processes=2"]  # fmt: skip


def named(run_dir: Path) -> dict[str, int]:
    """The members of a run by name; nodes have numbers of processes of their own."""
    attempt = RunFolder(run_dir).last_attempt
    assert attempt is not None
    told = ask_driver(attempt, StatusRequest(), HANG_S).processes
    found: dict[str, int] = {}
    for pid in processes_with("AREAL_TOKEN", token_of(run_dir)):
        with suppress(OSError):
            own = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()[-1]
            places = Path(f"/proc/{pid}/environ").read_bytes().decode().partition("AREAL_PLACES=")[2].partition("\0")[0]
            found |= {name: pid for name, one in told.items() if str(one.pid) == own and f'"{name}"' in places}
    return found


def token_of(run_dir: Path) -> str:
    """Which the processes of a run have in their environment."""
    attempt = RunFolder(run_dir).last_attempt
    assert attempt is not None
    return attempt.token.read_text()


def node_of(cluster: RayCluster, name: str) -> set[int]:
    """All processes of a node."""
    return {*cluster.processes(name)}


def start(workplace: Workplace, cluster: RayCluster, *words: str) -> tuple[subprocess.Popen[str], Path]:
    """A run on the cluster, and where it writes."""
    out = workplace.folder / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [*workplace.command, *words],
            cwd=workplace.folder, env={**workplace.environment, **cluster.environment}, stdout=file, stderr=file,
            text=True,
        )  # fmt: skip
    return process, out


@pytest.mark.nightly
def test_a_run_that_loses_a_process_and_then_a_node_goes_back_to_its_checkpoint_and_ends_well(
    cluster: RayCluster, workplace: Workplace
) -> None:
    words = [*run_words(cluster), "steps=200", "checkpoint.every=2", "launcher.placement_timeout_s=240"]
    process, out = start(workplace, cluster, *words)
    run_dir = workplace.folder / "run"
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    os.kill(named(run_dir)["trainer-1"], signal.SIGKILL)
    workplace.wait_for(lambda: "1 of at most 2 times" in out.read_text(), process)
    assert "trainer-1 on " in out.read_text()
    assert "was killed by SIGKILL" in out.read_text()
    before = len(workplace.metrics())
    workplace.wait_for(lambda: len(workplace.metrics()) >= before + 3, process)
    lost = next(name for name in ("n2", "n1") if node_of(cluster, name) & {*named(run_dir).values()})
    cluster.kill(lost)
    workplace.wait_for(lambda: out.read_text().count("going back to the last checkpoint") == 2, process)
    assert re.search(rf"on {lost} \(127.* was lost: nothing reports its exit code", out.read_text())
    assert process.wait(2 * HANG_S) == 0, out.read_text()
    assert workplace.metrics()[-1]["step"] == 200
    assert workplace.areal("audit", "run").code == 0
    assert processes_with("AREAL_TOKEN", token_of(run_dir)) == []


@pytest.mark.nightly
def test_nothing_is_left_of_a_run_whose_parent_is_killed_and_it_is_resumed(
    cluster: RayCluster, workplace: Workplace
) -> None:
    process, out = start(workplace, cluster, *run_words(cluster), "steps=400", "checkpoint.every=2")
    run_dir = workplace.folder / "run"
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    token, driver = token_of(run_dir), workplace.processes(process)
    assert len(processes_with("AREAL_TOKEN", token)) >= 8, "two ranks, a controller and a server, with their guards"
    process.kill()
    process.wait()
    wait_until(lambda: processes_with("AREAL_TOKEN", token) == [], "no process is left on any node")
    wait_until(lambda: not [pid for pid in driver if Path(f"/proc/{pid}").exists()], "nor here")
    more = [f"steps={len(workplace.metrics()) + 3}", "launcher.nodes=1"]
    resumed, out = start(workplace, cluster, "run", "--resume", "run", *more)
    assert resumed.wait(2 * HANG_S) == 0, out.read_text()
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_a_job_is_submitted_followed_and_stopped_after_a_checkpoint(cluster: RayCluster, workplace: Workplace) -> None:
    environment = {**workplace.environment, **cluster.environment, "RAY_API_SERVER_ADDRESS": cluster.jobs}
    words = [*run_words(cluster)[1:], "steps=4000", "--plugins", "ray"]
    submit = [*workplace.command, "ray", "submit"]
    submitted = subprocess.run(
        [*submit, *words], cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert submitted.returncode == 0, submitted.stderr
    name = submitted.stdout.partition("submitted as ")[2].split()[0]

    def told(command: str) -> str:
        """What a command that `areal ray submit` has printed says."""
        (line,) = [line for line in submitted.stdout.splitlines() if f"ray job {command}" in line]
        words = line[line.index("ray job") :].replace("--follow ", "").split()[1:]
        ray = [sys.executable, "-m", "ray.scripts.scripts", *words]
        done = subprocess.run(ray, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    wait_until(lambda: len(workplace.metrics()) >= 2 or "failed" in told("status"), "it trains")
    assert workplace.metrics(), told("logs")
    assert "run folder: " in told("logs")
    assert name in told("stop")
    wait_until(lambda: "stopped after a checkpoint" in told("logs"), "it has stopped in order")
    again = subprocess.run(
        [*submit, *words], cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "the run folder run exists already" in again.stderr
    done = len(workplace.metrics())
    submitted = subprocess.run(
        [*submit, "--resume", "run", f"steps={done + 3}"],
        cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: re.search("succeeded|failed", told("status")), "the resumed job has ended")
    assert len(workplace.metrics()) == done + 3, told("logs")


@pytest.mark.nightly
def test_a_cluster_of_this_machine_alone_begins_and_ends_with_the_run(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "launcher.type=ray", "launcher.address=null")
    assert done.code == 0, done.err
    assert processes_with("AREAL_CACHE", workplace.environment["AREAL_CACHE"]) == []
    assert workplace.areal("audit", "run").code == 0
