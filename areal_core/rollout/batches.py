"""What a batch holds when it is handed out: staleness at consumption, and its metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from areal_core.data.trajectory import FinishReason
from areal_core.rollout.staleness import token_staleness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.config.sections import RolloutSection
    from areal_core.data.batch import PackedBatch
    from areal_core.messages.workflows import GroupFacts


@dataclass(slots=True)
class Tally:
    """What happened since the last batch was handed out."""

    events: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the metrics of episodes."""
    failed_episodes: int = 0

    def add(self, facts: GroupFacts) -> None:
        """A group has ended."""
        self.rewards += facts.rewards
        self.failed_episodes += facts.failed
        for name, value in facts.metrics.items():
            self.sums[name] += value

    def take(self) -> dict[str, float]:
        """The metrics; what follows is counted anew."""
        metrics = {f"groups/{name}": float(count) for name, count in self.events.items()}
        if self.failed_episodes:
            metrics["episodes/failed"] = float(self.failed_episodes)
        if self.rewards:
            metrics["reward/all_episodes"] = sum(self.rewards) / len(self.rewards)
            metrics |= {name: value / len(self.rewards) for name, value in self.sums.items()}
        self.events.clear()
        self.rewards.clear()
        self.sums.clear()
        self.failed_episodes = 0
        return metrics


def mask_stale(
    batch: PackedBatch, published: Mapping[int, int], trained: int, section: RolloutSection
) -> tuple[PackedBatch, dict[str, float]]:
    """Take tokens over the bound out of the loss where the config says so, and measure staleness.

    Returns:
        The batch and metrics; staleness is that of the tokens that stay in the loss.
    """
    staleness = token_staleness(batch["versions"], batch["loss_mask"], published, trained)
    over = staleness > section.max_staleness
    if section.stale == "mask" and over.any():
        batch = batch.with_tokens(loss_mask=batch["loss_mask"] & ~over)
    kept = staleness[batch["loss_mask"]].float()
    metrics = {
        "staleness/mean": float(kept.mean()) if len(kept) else 0.0,
        "staleness/max": float(kept.max()) if len(kept) else 0.0,
        "staleness/tokens_over_bound": float(over.sum()),
    }
    shares = torch.bincount(kept.long()) / max(1, len(kept))
    return batch, metrics | {f"staleness/share_{age}": share for age, share in enumerate(shares.tolist())}


def batch_metrics(batch: PackedBatch) -> dict[str, float]:
    """What a batch holds: reward, lengths, truncation, and how many sequences and tokens."""
    sampled = torch.zeros(len(batch)).index_add(0, batch.tokens.row_index, batch["loss_mask"].float())
    metrics = {
        "reward/mean": float(batch["reward"].mean()),
        "reward/std": float(batch["reward"].std(correction=0)),
        "reward/groups_all_equal": _share_without_spread(batch),
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.token_count),
        "batch/sampled_tokens": float(sampled.sum()),
        "batch/response_length": float(sampled.mean()),
        "batch/truncated": float((batch["finish_reason"] == FinishReason.LENGTH).float().mean()),
    }
    named = [key for key in batch.sequences if key.startswith("reward.")]
    return metrics | {key.replace(".", "/", 1): float(batch[key].mean()) for key in named}


def _share_without_spread(batch: PackedBatch) -> float:
    """The share of groups whose sequences all earned the same, and so say nothing of what is better; groups of one
    sequence are not counted."""
    groups, index = torch.unique(batch["group_id"], return_inverse=True)
    spread = torch.zeros(len(groups)).scatter_reduce(0, index, batch["reward"], "amax", include_self=False)
    spread -= torch.zeros(len(groups)).scatter_reduce(0, index, batch["reward"], "amin", include_self=False)
    has_siblings = torch.bincount(index) > 1
    return float((spread[has_siblings] == 0).float().mean()) if has_siblings.any() else 0.0
