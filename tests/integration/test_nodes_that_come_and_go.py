"""Nodes that come while a run goes on, and go: told to, or lost; the run stops only for those that it cannot spare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.launchers.identity import processes_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.conftest import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HANG_S = 600
NODES = ("launcher.nodes=3", "launcher.trainer_processes=2", "checkpoint.every=1", "evaluation=null")
"""Ranks on the first two; nothing on the third, for the engine is embedded."""


def wardens(workplace: Workplace, node: str) -> list[int]:
    token = (sorted((workplace.folder / "run" / "epochs").iterdir())[-1] / "token").read_text()
    found = set(processes_with("AREAL_NODE", node)) & set(processes_with("AREAL_TOKEN", token))
    return [pid for pid in found if b"launchers.warden" in open(f"/proc/{pid}/cmdline", "rb").read()]  # noqa: PTH123


def nodes(workplace: Workplace) -> set[str]:
    return set(json.loads(workplace.areal("status", "run", "--json").out)["nodes"])


@pytest.fixture
def late(workplace: Workplace) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Wardens that nobody has brought."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for warden in started:
        warden.kill()
        warden.wait()


def join(workplace: Workplace, name: str) -> subprocess.Popen[bytes]:
    """A warden with the run's token, as whoever sees the run's folder may start it."""
    epoch = sorted((workplace.folder / "run" / "epochs").iterdir())[-1]
    address = json.loads((epoch / "owner.json").read_text())["address"]
    from areal_core.messages import Credentials

    told = Credentials((epoch / "token").read_text(), int(epoch.name)).as_environment()
    command = [sys.executable, "-m", "areal_core.launchers.warden", address, "60"]
    return subprocess.Popen(command, env={**workplace.environment, **told, "AREAL_NODE": name})


def test_nodes_that_hold_no_rank_come_and_go_and_the_run_goes_on(
    workplace: Workplace, late: list[subprocess.Popen[bytes]]
) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=100000", *NODES)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    assert nodes(workplace) == {"node-0", "node-1", "node-2"}
    late += [join(workplace, "late"), join(workplace, "later")]
    workplace.wait_for(lambda: nodes(workplace) >= {"late", "later"}, process)
    assert "  late                   nothing" in workplace.areal("status", "run").out
    os.kill(wardens(workplace, "node-2")[0], signal.SIGTERM)
    late[0].send_signal(signal.SIGTERM)
    assert late[0].wait(HANG_S) == 0, "a node that is let go ends in order"
    os.kill(late[1].pid, signal.SIGKILL)
    workplace.wait_for(lambda: nodes(workplace) == {"node-0", "node-1"}, process)
    done = len(workplace.metrics())
    workplace.wait_for(lambda: len(workplace.metrics()) >= done + 2, process)
    os.kill(wardens(workplace, "node-1")[0], signal.SIGTERM)  # it holds a rank
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    for told in (
        "the node late has come, with 0 GPUs",
        "the node node-2 is about to be taken away (SIGTERM)",
        "the run goes on without node-2; ended there: nothing",
        "the run goes on without late; ended there: nothing",
        "the node later is lost, and with it: nothing",
        "the node node-1 is about to be taken away (SIGTERM)",
        "stopped after a checkpoint",
    ):
        assert told in out, out
    assert "going back" not in out
    assert "without node-1" not in out
    assert len(list((workplace.folder / "run" / "epochs").iterdir())) == 1
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.long
def test_a_node_is_lost_in_the_middle_of_a_recovery(workplace: Workplace) -> None:
    """A rank is killed, and while the run goes back, the node of the other goes too: all nodes are brought anew."""
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=8", *NODES)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    os.kill(workplace.processes(process, "trainer-1")[-1], signal.SIGKILL)
    epochs = workplace.folder / "run" / "epochs"
    workplace.wait_for((epochs / "000002").is_dir, process)
    assert len(workplace.metrics()) < 8
    os.kill(wardens(workplace, "node-1")[0], signal.SIGKILL)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out + err
    assert "the node node-1 is lost, and with it: " in out
    assert "(2 of at most 3 times in an hour)" in out
    assert [line["step"] for line in workplace.metrics()] == list(range(1, 9))
    assert workplace.areal("audit", "run").code == 0
    assert not processes_with("AREAL_NODE", "node-1") or not wardens(workplace, "node-1")


@pytest.mark.long
def test_a_recovery_does_not_need_a_node_that_held_no_rank(workplace: Workplace) -> None:
    """It is lost, then a rank is: the next epoch begins on the nodes that are left, without bringing any anew."""
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=10", *NODES)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    os.kill(wardens(workplace, "node-2")[0], signal.SIGKILL)
    workplace.wait_for(lambda: nodes(workplace) == {"node-0", "node-1"}, process)
    first = wardens(workplace, "node-0")
    os.kill(workplace.processes(process, "trainer-1")[-1], signal.SIGKILL)
    workplace.wait_for((workplace.folder / "run" / "epochs" / "000002").is_dir, process)
    assert wardens(workplace, "node-0") == first
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out + err
    assert "the node node-2 is lost, and with it: nothing" in out
    assert "(1 of at most 3 times in an hour)" in out
    assert [line["step"] for line in workplace.metrics()] == list(range(1, 11))
    assert workplace.areal("audit", "run").code == 0
