"""What blocks holds up nobody, and is named."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from areal_core.training import aside
from areal_core.training.aside import Aside

if TYPE_CHECKING:
    import pytest


class Slow:
    """A call that has begun and does not return until it is released."""

    def __init__(self) -> None:
        self.release, self._begun = threading.Event(), threading.Event()

    def block(self, work: Aside) -> None:
        """Have it called, and wait until it is."""
        work.do(self._call)
        self._begun.wait()

    def _call(self) -> None:
        self._begun.set()
        self.release.wait()


def soon() -> float:
    return time.monotonic() + 60


def test_everything_is_done_in_order_before_it_ends() -> None:
    done: list[int] = []
    work = Aside("somebody", lambda _: None)
    for number in range(100):
        work.do(lambda number=number: done.append(number))
    work.end(lambda: done.append(100))
    work.wait(soon())
    assert done == list(range(101))


def test_what_blocks_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "WAITING", 3)
    told: list[str] = []
    slow = Slow()
    work, done = Aside("tracker Slow", told.append), []
    slow.block(work)
    for number in range(5):
        work.do(lambda number=number: done.append(number))
    work.wait(time.monotonic())
    assert done == []
    assert [line.partition(" for ")[0] for line in told] == ["tracker Slow has blocked"] * 2
    assert told[0].endswith("dropping new calls until it returns")
    assert told[1].endswith("dropping 3 queued calls")
    slow.release.set()


def test_the_last_call_is_made_however_many_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "WAITING", 1)
    told: list[str] = []
    slow, done = Slow(), []
    work = Aside("tracker Slow", told.append)
    slow.block(work)
    for number in range(3):
        work.do(lambda number=number: done.append(number))
    work.end(lambda: done.append(100))
    slow.release.set()
    work.wait(soon())
    assert done == [0, 100]
    assert told[-1] == "tracker Slow responds again; 2 calls were dropped"


def test_a_batch_is_left_out_where_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "BEHIND", 1)
    slow, done = Slow(), []
    work = Aside("tracker Slow", lambda _: None)
    slow.block(work)
    for number in range(4):
        work.do(lambda number=number: done.append(number), is_large=number > 1)
    slow.release.set()
    work.end(lambda: None)
    work.wait(soon())
    assert done == [0, 1]
