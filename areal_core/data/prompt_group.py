"""A prompt group: the episodes of one prompt, from the moment it is issued to the batch that consumes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from areal_core.data.batch import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data.trajectory import Episode


@dataclass(slots=True, eq=False)
class PromptGroup:
    """One prompt and its episodes.

    Attributes:
        number: its place in the data, and its `group_id`.
        occurrence: (row, epoch of the data).
        episodes: by sample index; None while one runs or where it failed. Empty once they are packed.
        missing: episodes that have not ended yet.
        failure: why an episode failed; empty where none did.
        batch: sequences of all groups that were packed together; None for a group without data.
        rows: which of them are this group's.
    """

    number: int
    occurrence: tuple[int, int]
    episodes: list[Episode | None] = field(default_factory=list)
    missing: int = 0
    failure: str = ""
    batch: PackedBatch | None = None
    rows: range = range(0)

    @property
    def finished_episodes(self) -> list[Episode]:
        """Those that ended well."""
        return [episode for episode in self.episodes if episode is not None]

    def staleness(self, published: Mapping[int, int], trained: int) -> int:
        """Batches between the weights of its oldest sampled token and the batch that would consume it now.

        Args:
            published: for each weight version the batches trained when it was published.
            trained: batches trained before the one that would consume it.
        """
        if self.batch is None or not self.rows:
            return 0
        oldest = int(self.batch["oldest_version"][self.rows.start : self.rows.stop].min())
        return 0 if oldest < 0 else max(0, trained - published[oldest])


def pack_groups(groups: Sequence[PromptGroup]) -> PackedBatch | None:
    """Pack the episodes of groups into one batch, with what the runtime knows of each: reward, ids, oldest version.

    Each group keeps the batch and its rows in it instead of its episodes.

    Returns:
        The batch; None where no group has data.
    """
    placed = [
        (group, index, part)
        for group in groups
        for index, episode in enumerate(group.episodes)
        if episode is not None
        for part in range(len(episode.trajectories))
    ]
    batch = _pack(placed) if placed else None
    start = 0
    for group in groups:
        count = sum(len(episode.trajectories) for episode in group.finished_episodes)
        group.batch, group.rows = (batch if count else None), range(start, start + count)
        group.episodes = []
        start += count
    return batch


def _pack(placed: Sequence[tuple[PromptGroup, int, int]]) -> PackedBatch:
    """Args: placed, of each trajectory its group, the episode's sample index and its place in the episode."""
    episodes = [group.episodes[index] for group, index, _ in placed]
    names = sorted({name for episode in episodes if episode for name in episode.rewards})
    integers = {
        "prompt_id": [group.occurrence for group, _, _ in placed],
        "group_id": [group.number for group, _, _ in placed],
        "episode_id": [group.number * len(group.episodes) + index for group, index, _ in placed],
        "sample_index": [index for _, index, _ in placed],
        "part_index": [part for _, _, part in placed],
    }
    rewards = {"reward": [episode.reward for episode in episodes if episode]}
    rewards |= {f"reward.{name}": [e.rewards.get(name, 0.0) for e in episodes if e] for name in names}
    columns = {key: torch.tensor(value, dtype=torch.int64) for key, value in integers.items()}
    columns |= {key: torch.tensor(value, dtype=torch.float32) for key, value in rewards.items()}
    parts = [episode.trajectories[part] for episode, (_, _, part) in zip(episodes, placed, strict=True) if episode]
    batch = PackedBatch.from_trajectories(parts)
    return batch.with_sequences(**columns, oldest_version=oldest_versions(batch))


def oldest_versions(batch: PackedBatch) -> torch.Tensor:
    """[B] int32: the oldest weight version that sampled a token of each sequence, -1 where none was sampled."""
    highest = torch.iinfo(torch.int32).max
    versions = torch.where(batch["loss_mask"], batch["versions"], highest)
    oldest = torch.full((len(batch),), highest, dtype=torch.int32)
    oldest.scatter_reduce_(0, batch.tokens.row_index, versions, "amin")
    return torch.where(oldest == highest, -1, oldest)


def join_groups(groups: Sequence[PromptGroup]) -> PackedBatch | None:
    """The sequences of these groups, in the order of the groups; None where none has data.

    Groups that were packed together are taken together: a batch of thousands of small groups costs a few gathers.
    """
    sources: dict[int, tuple[PackedBatch, list[int], list[int]]] = {}
    place = 0
    for group in groups:
        if group.batch is None:
            continue
        _, rows, places = sources.setdefault(id(group.batch), (group.batch, [], []))
        rows.extend(group.rows)
        places.extend(range(place, place + len(group.rows)))
        place += len(group.rows)
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
