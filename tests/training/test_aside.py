"""What blocks holds up nobody, and is named."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from areal_core.training import aside
from areal_core.training.aside import Aside

if TYPE_CHECKING:
    import pytest


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
    blocked, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        blocked.wait()

    work, done = Aside(told.append), []
    work.do("tracker Slow", block)
    begun.wait()
    for number in range(5):
        work.do("tracker Quick", lambda number=number: done.append(number))
    work.close()
    assert done == []
    assert [line.partition(" for ")[0] for line in told] == ["tracker Slow has not come back"] * 2
    assert told[0].endswith("what comes meanwhile is left out")
    assert told[1].endswith("it is left, with 3 calls behind it")
    blocked.set()


def test_what_was_left_out_is_counted_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "WAITING", 1)
    told: list[str] = []
    blocked, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        blocked.wait()

    work = Aside(told.append)
    work.do("tracker Slow", block)
    begun.wait()
    for _ in range(3):
        work.do("tracker Slow", lambda: None)
    blocked.set()
    work.close()
    assert told[-1] == "tracker Slow goes on; 2 calls were left out"
