"""Between the reward pool and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.messages.codec import message


@message
class WorkerReady:
    """The worker has loaded the run's rewards."""


@message
class Score:
    """Score one completion; requests are answered in the order in which they are sent, each under its number."""

    number: int
    arguments: Mapping[str, Any]


@message
class Scored:
    """The answer to `Score`: the weighted sum and its components."""

    number: int
    value: float
    components: Mapping[str, float]


@message
class ScoreFailed:
    """The answer to `Score` where a reward raised or returned no finite number."""

    number: int
    error: str
