"""The processes of a run in words: in plain lines, and in what `areal status` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.cli.commands.status import _lines
from areal_core.runtime import status as watching
from areal_core.runtime.attempts import claim, release
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.messages import ProcessStatus, RunStatus, StopRun
from areal_core.runtime.progress import Progress
from areal_core.runtime.rpc import Credentials, Done
from areal_core.runtime.status import describe_phases

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def process(node: str, phase: str, silent_s: float = 0.0, role: str = "trainer") -> ProcessStatus:
    return ProcessStatus(role, node, 7, phase, silent_s, "", ())


PROCESSES = {f"trainer-{rank}": process("node-0" if rank < 4 else "node-1", "train") for rank in range(8)} | {
    "trainer-1": process("node-0", "train", 5.0),
    "trainer-6": process("node-1", "checkpoint"),
    "trainer-7": process("node-1", "train", 12.4),
    "controller": process("node-0", "generating", role="controller"),
    "server-0": process("node-2", "serving", 30.0, role="server"),
}
DRIVING = RunStatus("head", 77, 3, PROCESSES)
WORDS = "controller: generating, server 0: serving, trainer 0-5, 7: train, trainer 6: checkpoint"


def test_processes_that_do_the_same_share_a_phrase() -> None:
    assert describe_phases({name: one.phase for name, one in PROCESSES.items()}) == WORDS
    assert describe_phases({f"worker-{number}": "x" for number in (10, 9, 2)}) == "worker 2, 9-10: x"
    assert describe_phases({}) == ""


def test_a_quiet_run_shows_the_phases_of_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    progress = Progress(RunFolder(tmp_path), 2, said.append)
    monkeypatch.setattr(progress, "_began_at", -1e9)
    progress.update(lambda: DRIVING)
    assert said == [WORDS]


def test_status_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", lambda *_: DRIVING)
    status = watching.run_status(run)
    assert status["processes"]["trainer-7"] == {
        "role": "trainer",
        "host": "node-1",
        "pid": 7,
        "phase": "train",
        "silent_s": 12.4,
        "address": "",
        "gpus": (),
    }
    lines = _lines(status, tmp_path)
    assert f"  {'driver':22s} process 77 on head" in lines
    assert f"  {'trainer-7':22s} train  process 7 on node-1  silent for 12 s" in lines


def test_the_status_of_a_stopping_run_shows_the_phases_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", lambda *_: RunStatus("head", 77, 3, PROCESSES, is_ending=True))
    run.metrics.write_text('{"step": 7, "time": 1.0, "servers/ready": 2.0, "engine/mfu": 0.6}\n')
    status = watching.run_status(run)
    assert (status["step"], status["metrics"]) == (7, {"servers/ready": 2.0})
    assert watching.waits_for(status) == WORDS
    assert f"  {'ending':22s} {watching.waits_for(status)}" in _lines(status, tmp_path)


def test_a_driver_that_is_stopping_is_asked_until_it_has_released_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer while it ends its processes, and its process, here the test's, still exists."""
    run, asked = RunFolder(tmp_path), []

    def answer(_: object, question: object, __: float) -> object:
        asked.append(question)
        if isinstance(question, StopRun):
            return Done()
        if len(asked) == 5:
            release(run.attempt(1), "interrupted 3 143")
        return DRIVING if len(asked) < 2 else None

    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", answer)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    assert watching.stop_run(run, now=True, patience_s=60.0, log=lambda _: None) == "interrupted"
    assert len(asked) == 5
