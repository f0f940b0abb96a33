"""The learning rate of each update."""

from __future__ import annotations

import math
from typing import Literal, Protocol


class ScheduleSettings(Protocol):
    """What a training engine's settings say of the learning rate."""

    @property
    def learning_rate(self) -> float:
        """The highest, reached after the warm-up."""

    @property
    def warmup_steps(self) -> int:
        """Updates over which it rises from 1 / `warmup_steps` of it."""

    @property
    def schedule(self) -> Literal["constant", "linear", "cosine"]:
        """After the warm-up."""

    @property
    def minimum_learning_rate_ratio(self) -> float:
        """Where linear and cosine end, as a share of `learning_rate`."""


def learning_rate_at(update: int, settings: ScheduleSettings, total_updates: int) -> float:
    """The learning rate of an update.

    Args:
        update: how many updates were applied before it.
        settings: warm-up, schedule and bounds.
        total_updates: of the whole run; a decay ends there.
    """
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    lowest = settings.minimum_learning_rate_ratio
    return settings.learning_rate * (lowest + (1 - lowest) * left)
