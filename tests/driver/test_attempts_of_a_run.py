"""A run recovers from losses in further attempts, and records how it has ended."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.driver import execution
from areal_core.errors import LostError, RunError
from areal_core.runtime.attempts import claim
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.rpc import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.runtime.folder import AttemptFolder

LOST = LostError("trainer-0 was killed by SIGKILL")
FAILED = RunError("the reward failed", exit_code=1)


class StubSupervisor:
    """Runs no processes. Each attempt ends as the test has planned it.

    Args:
        ends: for each attempt an exit code, an error to raise, or a function that is called for either.
    """

    def __init__(self, ends: Sequence[Any]) -> None:
        self._ends = [*ends]
        self.credentials = Credentials.create(0)
        self.signals: list[int] = []
        self.ended_attempts = 0
        self.is_closed = False

    async def listen(self) -> str:
        return "tcp:127.0.0.1:9"

    def admit(self, attempt: AttemptFolder) -> None:
        self.credentials = Credentials(self.credentials.token, attempt.number)

    async def start(self, groups: Sequence[Any], optional: Sequence[Any]) -> None:
        pass

    async def watch(self, role: str, update: Callable[[], None]) -> int:
        end = self._ends.pop(0)
        if callable(end):
            end = end()
        if isinstance(end, Exception):
            raise end
        return int(end)

    async def end_others(self, code: int) -> None:
        pass

    async def end_attempt(self, *, keeps: Callable[[Any], bool]) -> None:
        self.ended_attempts += 1

    def describe(self) -> Any:
        raise AssertionError("nothing has been quiet for long")

    async def close(self) -> None:
        self.is_closed = True


class Driven:
    """A run that is driven to its end, and what it has left."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: Sequence[Any]) -> None:
        self.run = RunFolder(folder / "run")
        self.messages: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.supervisor = StubSupervisor(ends)
        monkeypatch.setattr(execution, "Supervisor", lambda *_: self.supervisor)
        monkeypatch.setattr(execution, "process_groups", lambda *_: [])

    def drive(self) -> int:
        """Drive the run. Return its exit code."""
        model = SimpleNamespace(path=None, source=None)
        config = SimpleNamespace(
            steps=3, model=model, roles={}, launcher=SimpleNamespace(settings=None), has_elastic_servers=False
        )
        events = SimpleNamespace(
            run_started=lambda *_: None,
            run_finished=lambda _, word, number: self.finished.append((word, number)),
        )
        resolved: Any = SimpleNamespace(
            config=config, plugins=SimpleNamespace(events=events), to_yaml=lambda _: "steps: 3\n"
        )
        terminal: Any = SimpleNamespace(log=self.messages.append, keep=lambda _: None, log_path=None)
        driven = execution._Execution(resolved, self.run, None, terminal)  # type: ignore[arg-type]
        try:
            return asyncio.run(driven.drive(self.run.attempt(1), [], []))
        finally:
            assert self.supervisor.is_closed

    def outcomes(self) -> list[str]:
        return [attempt.released.read_text() for attempt in self.run.attempts()]


def test_a_run_is_done_after_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, monkeypatch, [0])
    assert driven.drive() == 0
    assert driven.outcomes() == ["done 3"]
    assert driven.finished == [("done", 0)]


def test_a_loss_leads_to_another_attempt_by_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, monkeypatch, [LOST, 0])
    assert driven.drive() == 0
    assert driven.outcomes() == ["recovering", "done 3"]
    assert driven.supervisor.ended_attempts == 1
    assert driven.supervisor.credentials.attempt == 2
    assert any("the run starts over (1 of at most 2 times" in message for message in driven.messages)


def test_losses_without_a_checkpoint_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, monkeypatch, [LOST, LOST, LOST])
    with pytest.raises(RunError, match="the run went back 2 times"):
        driven.drive()
    assert driven.outcomes() == ["recovering", "recovering", "failed 3 1"]


def test_a_failure_ends_the_run_and_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path, monkeypatch, [FAILED])
    with pytest.raises(RunError, match=r"the reward failed[\s\S]*areal run --resume"):
        driven.drive()
    assert driven.outcomes() == ["failed 3 1"]
    assert driven.finished == [("failed", 0)]


@pytest.mark.parametrize("end", [ASKED_TO_STOP, LOST], ids=["stopped", "lost while it stopped"])
def test_a_signal_interrupts_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: object) -> None:
    def interrupt() -> object:
        driven.supervisor.signals.append(signal.SIGTERM)
        return end

    driven = Driven(tmp_path, monkeypatch, [interrupt])
    assert driven.drive() == 143
    assert driven.outcomes() == ["interrupted 3 143"]
    assert driven.finished == [("interrupted", signal.SIGTERM)]
    assert driven.messages[-1].startswith("stopped before the first checkpoint; continue with: areal run --resume")


def test_a_run_that_was_taken_over_is_left_to_its_new_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_over() -> LostError:
        claim(driven.run.attempt(2), "tcp:127.0.0.1:9", Credentials.create(2))
        return LOST

    driven = Driven(tmp_path, monkeypatch, [take_over])
    with pytest.raises(RunError, match="another process has taken over the run"):
        driven.drive()
    assert driven.run.attempt(1).released.read_text() == "failed 3 1"
    assert not driven.run.attempt(2).released.exists()
    assert driven.finished == []
