"""Messages between the reward pool and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.runtime.frames import Message


class WorkerReady(Message):
    """The worker has loaded the run's rewards.

    Attributes:
        max_concurrency: number of requests that the worker scores concurrently, oldest first. With 1 it answers in
            order.
    """

    max_concurrency: int


class Score(Message):
    """Score one completion. The worker starts requests in the order in which they arrive.

    Attributes:
        number: number of the request, repeated in its answer.
        arguments: arguments of the reward functions.
    """

    number: int
    arguments: Mapping[str, Any]


class Scored(Message):
    """The answer to `Score`.

    Attributes:
        value: weighted sum of the rewards.
        components: reward of each function by its name.
        metrics: counters of the reward functions since the worker's last answer. The pool adds them up.
    """

    number: int
    value: float
    components: Mapping[str, float]
    metrics: Mapping[str, float]


class ScoreFailed(Message):
    """The answer to `Score` if a reward function raised an exception or did not return a finite number."""

    number: int
    error: str
