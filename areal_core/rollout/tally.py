"""Counts events of the rollouts between two batches, as metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.messages.workflows import GroupOutcome


@dataclass(slots=True)
class Tally:
    """Counts since the last batch that the trainer took."""

    events: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of the episodes' metrics by name."""
    counted: Counter[str] = field(default_factory=Counter)
    """Counts of the rewards by name."""
    failed_episodes: int = 0

    def add(self, outcome: GroupOutcome) -> None:
        """Count a group that has ended."""
        self.rewards += outcome.rewards
        self.failed_episodes += outcome.failed
        self.counted.update(outcome.counted)
        for name, value in outcome.metrics.items():
            self.sums[name] += value

    def take(self) -> dict[str, float]:
        """Return the metrics, and start counting from 0."""
        metrics = {f"groups/{name}": float(count) for name, count in self.events.items()}
        metrics |= {f"rewards/{name}": value for name, value in self.counted.items()}
        if self.failed_episodes:
            metrics["episodes/failed"] = float(self.failed_episodes)
        if self.rewards:
            metrics["reward/all_episodes"] = sum(self.rewards) / len(self.rewards)
            metrics |= {name: value / len(self.rewards) for name, value in self.sums.items()}
        self.events.clear()
        self.counted.clear()
        self.rewards.clear()
        self.sums.clear()
        self.failed_episodes = 0
        return metrics
