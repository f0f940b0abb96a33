"""A prompt group: the episodes of one prompt, from the moment it is issued to the batch that consumes it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
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
        batch: the sequences of its episodes, among those of other groups once they are written together; None for a
            group without data.
        rows: which of them are this group's.
    """

    number: int
    occurrence: tuple[int, int]
    batch: PackedBatch | None = None
    rows: range = range(0)

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


def pack_episodes(
    number: int, occurrence: tuple[int, int], group_size: int, episodes: Mapping[int, Episode]
) -> PackedBatch:
    """Pack the episodes of one group, with what the runtime knows of each: reward, ids, oldest version.

    Args:
        number, occurrence: of the group.
        group_size: episodes that it was to have.
        episodes: those that ended well, at least one, by sample index.
    """
    placed = [(row, part, episode) for row, episode in episodes.items() for part in range(len(episode.trajectories))]
    names = sorted({name for episode in episodes.values() for name in episode.rewards})
    integers = {
        "prompt_id": [occurrence] * len(placed),
        "group_id": [number] * len(placed),
        "episode_id": [number * group_size + index for index, _, _ in placed],
        "sample_index": [index for index, _, _ in placed],
        "part_index": [part for _, part, _ in placed],
        "player": [zlib.crc32(e.trajectories[n].player.encode("utf-8", "backslashreplace")) for _, n, e in placed],
    }
    rewards = {"reward": [episode.reward + episode.trajectories[part].earned for _, part, episode in placed]}
    rewards |= {f"reward.{name}": [episode.rewards.get(name, 0.0) for _, _, episode in placed] for name in names}
    columns = {key: torch.tensor(value, dtype=torch.int64) for key, value in integers.items()}
    columns |= {key: torch.tensor(value, dtype=torch.float32) for key, value in rewards.items()}
    batch = PackedBatch.from_trajectories([episode.trajectories[part] for _, part, episode in placed])
    return batch.with_sequences(**columns, oldest_version=oldest_versions(batch))


def put_together(groups: Sequence[PromptGroup]) -> PackedBatch | None:
    """One batch of the sequences of these groups, to be written once; each group then has its rows in it.

    Returns:
        The batch; None where no group has data.
    """
    having = [group for group in groups if group.batch is not None]
    if not having:
        return None
    batch = PackedBatch.concatenate(_with_same_rewards([group.batch for group in having if group.batch is not None]))
    start = 0
    for group in having:
        group.batch, group.rows = batch, range(start, start + len(group.rows))
        start += len(group.rows)
    return batch


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
    return [part.with_sequences(**{key: torch.zeros(len(part)) for key in names if key not in part}) for part in parts]
