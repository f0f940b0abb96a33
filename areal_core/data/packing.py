"""Packing prompt groups: what becomes of episodes when a group has ended, and of groups in a batch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from areal_core.data.batch import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data.trajectory import Episode


def pack_episodes(
    number: int, occurrence: tuple[int, int], group_size: int, episodes: Mapping[int, Episode]
) -> PackedBatch:
    """Pack the episodes of one group, with what the runtime knows of each: reward and ids.

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
    return batch.with_sequences(**columns)


def sampled_versions(batch: PackedBatch) -> list[int]:
    """The weight versions that sampled its tokens, the oldest first."""
    found: list[int] = torch.unique(batch["versions"][batch["loss_mask"]]).tolist()
    return found


def column_layout(batch: PackedBatch) -> dict[str, str]:
    """The name, dtype and shape of every column but the named rewards, which may be missing: `{"ids": "int64[3]"}`."""
    turns = batch.turns.values if batch.turns is not None else {}
    levels = (batch.tokens.values, turns, batch.sequences, *(level.values for level in batch.levels.values()))
    columns = {key: value for level in levels for key, value in level.items() if not key.startswith("reward.")}
    return {key: f"{value.dtype}{[*value.shape[1:]]}" for key, value in columns.items()}


def join_batches(parts: Sequence[PackedBatch]) -> PackedBatch | None:
    """The sequences of all, in this order; None where there are none."""
    return PackedBatch.concatenate(_with_same_rewards(parts)) if parts else None


def _with_same_rewards(parts: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Named rewards differ where a reward returned no value of that name in a whole group: it counts as 0."""
    names = {key for part in parts for key in part.sequences if key.startswith("reward.")}
    return [part.with_sequences(**{key: torch.zeros(len(part)) for key in names if key not in part}) for part in parts]
