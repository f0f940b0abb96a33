"""Which of several failures is the cause."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import Place, ProcessEnd, ProcessGroup
from areal_core.runtime import cause
from areal_core.runtime.cause import find_cause
from areal_core.runtime.hub import Process
from areal_core.runtime.messages import ProcessFailed

if TYPE_CHECKING:
    import pytest

CONSEQUENCE = ProcessFailed("the controller was lost", (), 1, "", is_consequence=True)
LIBRARY_ERROR = ProcessFailed("RuntimeError: connection reset by peer", (), 1, "Traceback ...")
OWN_CAUSE = ProcessFailed("the disk is full", ("free some space",), 1, "")


class Ranks:
    """Three trainer ranks, of which some have ended and reported."""

    def __init__(self) -> None:
        group = ProcessGroup("trainer", "trainer", ["-"], count=3)
        self.ranks = [Process(group, rank, Place("here"), 1, {}, Path(f"{rank}.log")) for rank in range(3)]
        self.reports: list[tuple[Process, ProcessFailed]] = []

    def end(self, rank: int, code: int | None, failure: ProcessFailed | None = None) -> None:
        if failure is not None:
            self.reports.append((self.ranks[rank], failure))
        self.ranks[rank].ended.set_result(ProcessEnd(code))

    async def cause(self) -> RunError:
        error = await find_cause(self.reports, lambda: self.ranks)
        assert isinstance(error, RunError)
        return error


def test_a_cause_that_a_process_names_counts_before_all_others_end() -> None:
    async def check() -> None:
        ranks = Ranks()
        ranks.end(0, 1, OWN_CAUSE)
        error = await ranks.cause()
        assert (error.message, error.hints) == ("the disk is full", ("free some space",))
        assert not isinstance(error, LostError)

    asyncio.run(check())


def test_a_killed_rank_counts_and_not_the_error_of_a_library_in_another() -> None:
    async def check() -> None:
        ranks = Ranks()
        ranks.end(1, 1, LIBRARY_ERROR)
        finding = asyncio.ensure_future(ranks.cause())
        await asyncio.sleep(3 * cause.POLL_S)
        assert not finding.done(), "the others may name a better cause"
        ranks.end(0, -9)
        error = await finding
        assert isinstance(error, LostError)
        assert error.message == "trainer-0 on here was killed by SIGKILL"
        assert error.hints == ("its log: 0.log",)

    asyncio.run(check())


def test_the_error_of_a_library_counts_when_all_have_ended_and_none_was_killed() -> None:
    async def check() -> None:
        ranks = Ranks()
        ranks.end(0, 1, CONSEQUENCE)
        ranks.end(1, 1, LIBRARY_ERROR)
        ranks.end(2, 1, CONSEQUENCE)
        error = await ranks.cause()
        assert error.message.startswith("trainer-1 on here failed: RuntimeError: connection reset by peer")
        assert not isinstance(error, LostError)

    asyncio.run(check())


def test_a_consequence_counts_if_nothing_better_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause, "TIMEOUT_S", 0.1)

    async def check() -> None:
        ranks = Ranks()
        ranks.end(2, 1, CONSEQUENCE)
        assert (await ranks.cause()).message == "the controller was lost"

    asyncio.run(check())


def test_a_rank_that_the_hub_refused_counts_first() -> None:
    async def check() -> None:
        ranks = Ranks()
        ranks.end(0, 1, OWN_CAUSE)
        ranks.ranks[2].end_reason = "n2: its machine does not see the run folder"
        ranks.end(2, None)
        error = await ranks.cause()
        assert isinstance(error, LostError)
        assert error.message == "trainer-2: n2: its machine does not see the run folder"

    asyncio.run(check())


def test_a_crash_does_not_hide_the_cause_that_another_rank_reports() -> None:
    """NCCL's watchdog aborts a rank because another one has failed."""

    async def check() -> None:
        ranks = Ranks()
        ranks.end(1, -signal.SIGABRT)
        finding = asyncio.ensure_future(ranks.cause())
        await asyncio.sleep(3 * cause.POLL_S)
        assert not finding.done(), "another rank may report the cause"
        ranks.end(0, 1, LIBRARY_ERROR)
        ranks.end(2, -signal.SIGABRT)
        error = await finding
        assert LIBRARY_ERROR.text in error.message
        assert not isinstance(error, LostError)

    asyncio.run(check())


def test_a_crash_alone_is_the_cause() -> None:
    async def check() -> None:
        ranks = Ranks()
        for rank in range(3):
            ranks.end(rank, -signal.SIGSEGV)
        error = await ranks.cause()
        assert "was killed by SIGSEGV" in error.message
        assert isinstance(error, LostError)

    asyncio.run(check())
