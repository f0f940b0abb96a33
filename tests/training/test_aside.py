"""What blocks holds up nobody, and is named."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from areal_core.training import aside
from areal_core.training.aside import Aside

if TYPE_CHECKING:
    import pytest


class Slow:
    """A tracker that has begun and does not come back until it is let go."""

    def __init__(self) -> None:
        self.let_go, self._begun = threading.Event(), threading.Event()

    def hold_up(self, work: Aside) -> None:
        """Have it called, and wait until it is."""
        work.do("tracker Slow", self._call)
        self._begun.wait()

    def _call(self) -> None:
        self._begun.set()
        self.let_go.wait()


def test_everything_is_done_in_order_before_it_closes() -> None:
    done: list[int] = []
    work = Aside(lambda _: None)
    for number in range(100):
        work.do("somebody", lambda number=number: done.append(number))
    work.close()
    assert done == list(range(100))


def test_what_blocks_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "WAITING", 3)
    monkeypatch.setattr(aside, "PATIENCE_S", 0.2)
    told: list[str] = []
    slow = Slow()
    work, done = Aside(told.append), []
    slow.hold_up(work)
    for number in range(5):
        work.do("tracker Quick", lambda number=number: done.append(number))
    work.close()
    assert done == []
    assert [line.partition(" for ")[0] for line in told] == ["tracker Slow has not come back"] * 2
    assert told[0].endswith("what comes meanwhile is left out")
    assert told[1].endswith("it is left, with 3 calls behind it")
    slow.let_go.set()


def test_what_was_left_out_is_counted_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "WAITING", 1)
    told: list[str] = []
    slow = Slow()
    work = Aside(told.append)
    slow.hold_up(work)
    for _ in range(3):
        work.do("tracker Slow", lambda: None)
    slow.let_go.set()
    work.close()
    assert told[-1] == "tracker Slow goes on; 2 calls were left out"
