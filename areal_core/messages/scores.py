"""Between the reward pool and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.messages.frames import Message


class WorkerReady(Message):
    """The worker has loaded the run's rewards.

    Attributes:
        max_concurrency: requests that it works on at a time, the oldest ones; with 1 it answers in order.
    """

    max_concurrency: int


class Score(Message):
    """Score one completion; requests are begun in the order in which they are sent, each answered under its number."""

    number: int
    arguments: Mapping[str, Any]


class Scored(Message):
    """The answer to `Score`: the weighted sum and its components.

    Attributes:
        metrics: what rewards have counted since the worker's last answer, to be added up.
    """

    number: int
    value: float
    components: Mapping[str, float]
    metrics: Mapping[str, float]


class ScoreFailed(Message):
    """The answer to `Score` where a reward raised or returned no finite number."""

    number: int
    error: str
