"""From finished groups to batches: packing, staleness at consumption, and what a batch's metrics say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.trajectory import FinishReason, Trajectory
from areal_core.rollout.staleness import token_staleness

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from areal_core.ledger.store import FinishedGroup
    from areal_core.rollout.controller import Group, RolloutPolicy


@dataclass(slots=True)
class FlushedGroup:
    """A finished group whose trajectories are durable: a view into the batch it was written with.

    Attributes:
        number: of the group.
        batch: sequences of all groups of one flush; None for a group without data.
        members: which of them are this group's.
        oldest_version: that sampled one of its tokens, -1 where none was sampled.
    """

    number: int
    batch: PackedBatch | None
    members: range
    oldest_version: int

    @classmethod
    def of(cls, number: int, batch: PackedBatch | None, members: range) -> FlushedGroup:
        """The group with its oldest version read off the tokens."""
        if batch is None or not members:
            return cls(number, None, range(0), -1)
        oldest = int(batch["oldest_version"][members.start : members.stop].min())
        return cls(number, batch, members, oldest)

    def staleness(self, published: Mapping[int, int], trained: int) -> int:
        """Batches between the weights of its oldest sampled token and the batch that would consume it now."""
        return 0 if self.oldest_version < 0 else max(0, trained - published[self.oldest_version])


def pack_groups(groups: Sequence[Group]) -> tuple[PackedBatch | None, list[tuple[int, range]]]:
    """Pack the trajectories of groups that ended, with what the runtime knows of each: reward, ids, oldest version.

    Returns:
        The batch, None where no group has data, and for each group its number and its sequences in the batch.
    """
    trajectories: list[Trajectory] = []
    ranges: list[tuple[int, range]] = []
    columns: dict[str, list[object]] = {
        "reward": [],
        "prompt_id": [],
        "group_id": [],
        "episode_id": [],
        "sample_index": [],
    }
    named = sorted({name for group in groups for episode in group.episodes if episode for name in episode.rewards})
    columns |= {f"reward.{name}": [] for name in named}
    for group in groups:
        first = len(trajectories)
        for index, episode in enumerate(group.episodes):
            if episode is None:
                continue
            for trajectory in episode.trajectories:
                trajectories.append(trajectory)
                columns["reward"].append(episode.reward)
                columns["prompt_id"].append(group.occurrence)
                columns["group_id"].append(group.number)
                columns["episode_id"].append(group.number * len(group.episodes) + index)
                columns["sample_index"].append(index)
                for name in named:
                    columns[f"reward.{name}"].append(episode.rewards.get(name, 0.0))
        ranges.append((group.number, range(first, len(trajectories))))
    if not trajectories:
        return None, ranges
    batch = PackedBatch.from_trajectories(trajectories)
    integers = {"prompt_id", "group_id", "episode_id", "sample_index"}
    values = {k: torch.tensor(v, dtype=torch.int64 if k in integers else torch.float32) for k, v in columns.items()}
    return batch.with_sequences(**values, oldest_version=oldest_versions(batch)), ranges


def oldest_versions(batch: PackedBatch) -> torch.Tensor:
    """[B] int32: the oldest weight version that sampled a token of each sequence, -1 where none was sampled."""
    highest = torch.iinfo(torch.int32).max
    versions = torch.where(batch["loss_mask"], batch["versions"], highest)
    oldest = torch.full((len(batch),), highest, dtype=torch.int32)
    oldest.scatter_reduce_(0, batch.tokens.row_index, versions, "amin")
    return torch.where(oldest == highest, -1, oldest)


def join_groups(groups: Sequence[FlushedGroup]) -> PackedBatch | None:
    """The sequences of these groups, in the order of the groups; None where none has data.

    Groups that were written together are taken together: a batch of thousands of small groups costs a few gathers.
    """
    sources: dict[int, tuple[PackedBatch, list[int], list[int]]] = {}
    place = 0
    for group in groups:
        if group.batch is None:
            continue
        _, rows, places = sources.setdefault(id(group.batch), (group.batch, [], []))
        rows.extend(group.members)
        places.extend(range(place, place + len(group.members)))
        place += len(group.members)
    if not sources:
        return None
    parts = [batch.select(rows) for batch, rows, _ in sources.values()]
    order = torch.tensor([p for _, _, places in sources.values() for p in places])
    joined = PackedBatch.concatenate(_with_same_rewards(parts))
    return joined if len(parts) == 1 else joined.select(torch.argsort(order))


def _with_same_rewards(parts: list[PackedBatch]) -> list[PackedBatch]:
    """Named rewards differ where a reward returned no value of that name in a whole segment: it counts as 0."""
    names = {key for part in parts for key in part.sequences if key.startswith("reward.")}
    return [
        part.with_sequences(**{name: torch.zeros(len(part)) for name in names if name not in part}) for part in parts
    ]


def restore_groups(groups: Iterable[FinishedGroup]) -> list[FlushedGroup]:
    """Groups that a resumed run found finished in its ledger."""
    return [FlushedGroup.of(group.number, group.batch, group.rows) for group in groups]


def mask_stale(
    batch: PackedBatch, published: Mapping[int, int], trained: int, policy: RolloutPolicy
) -> tuple[PackedBatch, dict[str, float]]:
    """Take tokens over the bound out of the loss where the policy says so, and measure staleness.

    Returns:
        The batch and metrics; staleness is that of the tokens that stay in the loss.
    """
    staleness = token_staleness(batch["versions"], batch["loss_mask"], published, trained)
    over = staleness > policy.bound.max_staleness
    if policy.stale == "mask" and over.any():
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
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.token_count),
        "batch/sampled_tokens": float(sampled.sum()),
        "batch/response_length": float(sampled.mean()),
        "batch/truncated": float((batch["finish_reason"] == FinishReason.LENGTH).float().mean()),
    }
    named = [key for key in batch.sequences if key.startswith("reward.")]
    return metrics | {key.replace(".", "/", 1): float(batch[key].mean()) for key in named}
