"""What happened between two batches, as metrics of the rollouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.messages.workflows import GroupFacts


@dataclass(slots=True)
class Tally:
    """What happened since the last batch was handed out."""

    events: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the metrics of episodes."""
    counted: Counter[str] = field(default_factory=Counter)
    """By rewards."""
    failed_episodes: int = 0

    def add(self, facts: GroupFacts) -> None:
        """A group has ended."""
        self.rewards += facts.rewards
        self.failed_episodes += facts.failed
        self.counted.update(facts.counted)
        for name, value in facts.metrics.items():
            self.sums[name] += value

    def take(self) -> dict[str, float]:
        """The metrics; what follows is counted anew."""
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
