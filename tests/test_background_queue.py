"""A queue of calls in a thread: their order, the bound, and a call that blocks."""

from __future__ import annotations

import threading
import time

from areal_core.background import BackgroundQueue


class BlockingCall:
    """A call that has begun and does not return until it is released."""

    def __init__(self) -> None:
        self.release, self._begun = threading.Event(), threading.Event()

    def put(self, queue: BackgroundQueue) -> None:
        """Queue the call, and wait until it is under way."""
        queue.put(self._call)
        self._begun.wait()

    def _call(self) -> None:
        self._begun.set()
        self.release.wait()


def in_a_minute() -> float:
    return time.monotonic() + 60


def test_all_calls_are_made_in_order_before_it_is_closed() -> None:
    made: list[int] = []
    queue = BackgroundQueue("calls", 1000, lambda count: made.append(-count))
    for number in range(100):
        assert queue.put(lambda number=number: made.append(number)) == 0
    assert queue.close(in_a_minute())
    queue.put(lambda: made.append(100))
    assert made == list(range(100)), "and none after that"


def test_a_full_queue_drops_its_oldest_calls_and_reports_their_number() -> None:
    made: list[str] = []
    queue, blocking = BackgroundQueue("calls", 2, lambda count: made.append(f"{count} dropped")), BlockingCall()
    blocking.put(queue)
    counts = [queue.put(lambda number=number: made.append(f"call {number}")) for number in range(5)]
    assert counts == [0, 0, 1, 2, 3]
    blocking.release.set()
    assert queue.close(in_a_minute())
    assert made == ["3 dropped", "call 3", "call 4"]


def test_a_call_that_blocks_ends_the_wait_at_its_deadline() -> None:
    made: list[str] = []
    queue, blocking = BackgroundQueue("calls", 2, lambda _: None), BlockingCall()
    assert queue.blocked_s == 0
    blocking.put(queue)
    queue.put(lambda: made.append("behind it"))
    assert not queue.close(time.monotonic())
    assert (len(queue), made) == (1, [])
    assert queue.blocked_s > 0
    blocking.release.set()
    assert queue.close(in_a_minute())
    assert made == ["behind it"], "it is made once the call before it returns"
