"""Waits poll, report progress, and end at their deadline."""

from __future__ import annotations

import asyncio

import pytest

from areal_core import waiting
from areal_core.waiting import backoff_s, polls, polls_async


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by one that only sleeping moves. The pauses are collected."""
    slept: list[float] = []

    async def sleep_async(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(waiting.time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    monkeypatch.setattr(waiting.asyncio, "sleep", sleep_async)
    return slept


def all_polls(timeout_s: float, *, is_async: bool, **options: object) -> list[float]:
    """Return the times of all polls with 4 s between them."""
    if not is_async:
        return list(polls(4.0, timeout_s, **options))  # type: ignore[arg-type]

    async def collect() -> list[float]:
        return [waited_s async for waited_s in polls_async(4.0, timeout_s, **options)]  # type: ignore[arg-type]

    return asyncio.run(collect())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.usefixtures("pauses")
def test_polls_begin_immediately_and_end_with_one_at_the_deadline(is_async: bool) -> None:
    assert all_polls(10.0, is_async=is_async) == [0.0, 4.0, 8.0, 10.0]
    assert all_polls(0.0, is_async=is_async) == [0.0]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.usefixtures("pauses")
def test_progress_is_logged_now_and_then_with_what_is_awaited(is_async: bool) -> None:
    messages: list[str] = []
    awaited = iter(["2 machines", "1 machine"])
    all_polls(25.0, is_async=is_async, log=messages.append, waiting_for=lambda: next(awaited))
    assert messages == ["waited 12 s of at most 25 s for 2 machines", "waited 24 s of at most 25 s for 1 machine"]


def test_a_wait_without_a_deadline_names_none_and_ends_when_its_caller_stops(pauses: list[float]) -> None:
    messages: list[str] = []
    for waited_s in polls(6.0, log=messages.append, waiting_for=lambda: "a server"):
        if waited_s >= 12.0:
            break
    assert messages == []
    for waited_s in polls(6.0, log=messages.append, waiting_for=lambda: "a server"):
        if waited_s > 12.0:
            break
    assert messages == ["waited 12 s for a server"]
    assert sum(pauses) == 30.0


def test_backoff_grows_to_its_limit() -> None:
    assert [backoff_s(failures, first_s=1.0, factor=5.0, longest_s=30.0) for failures in (1, 2, 3, 4)] == [1, 5, 25, 30]


def test_the_last_poll_is_at_the_deadline_also_if_the_work_between_polls_crosses_it(pauses: list[float]) -> None:
    times = []
    for waited_s in polls(4.0, 10.0):
        times.append(waited_s)
        pauses.append(12.0)  # the work takes as long
    assert times == [0.0, 12.0]
