"""Packing the trajectories of a prompt group into columns, and the columns into the bytes of a record.

A column has the concatenated values of one key. Each level of keys also has a column of lengths. The bytes are a
safetensors buffer of the columns. This module does not import torch: rollout workers pack, and trainer ranks read with
`PackedBatch.from_bytes`.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from safetensors.numpy import load

from areal_core.data.trajectory import Trajectory, Values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from areal_core.data.trajectory import Episode

Columns = dict[str, Values]
"""`tokens.KEY`, `turns.KEY` and `multimodal.NAME.KEY`: [sum of lengths, ...]; lengths: `tokens/lengths` and so on,
[B] int64; `sequences.KEY`: [B, ...]."""

_Numbers = TypeVar("_Numbers")
_KINDS = {"b": "BOOL", "u": "U", "i": "I", "f": "F"}
"""Names of dtypes in safetensors, without the number of bits, by NumPy's kind."""


def pack(trajectories: Sequence[Trajectory]) -> Columns:
    """Pack trajectories into columns, in order. All must have the same keys.

    Raises:
        ValueError: there are no trajectories, or their keys differ. The message names the differing keys.
    """
    if not trajectories:
        raise ValueError("a batch needs at least one trajectory")
    levels = {"tokens": [t.tokens for t in trajectories]}
    if any(t.turns for t in trajectories):
        levels["turns"] = [t.turns for t in trajectories]
    for name in keys_in_common([t.multimodal for t in trajectories]):
        levels[f"multimodal.{name}"] = [t.multimodal[name] for t in trajectories]
    columns: Columns = {}
    for name, rows in levels.items():
        columns[f"{name}/lengths"] = np.array([len(next(iter(row.values()), ())) for row in rows])
        columns |= {f"{name}.{key}": np.concatenate([row[key] for row in rows]) for key in keys_in_common(rows)}
    sequences = [t.sequence for t in trajectories]
    return columns | {f"sequences.{k}": np.stack([s[k] for s in sequences]) for k in keys_in_common(sequences)}


def unpack(columns: Mapping[str, Values]) -> list[Trajectory]:
    """Return the sequences of columns as trajectories, which are views."""
    rows: list[dict[str, dict[str, Values]]] = [{} for _ in columns["tokens/lengths"]]
    for name in [name.removesuffix("/lengths") for name in columns if name.endswith("/lengths")]:
        places = np.cumsum(columns[f"{name}/lengths"])[:-1]
        for row in rows:
            row[name] = {}
        for key, values in level_of(columns, name).items():
            for row, part in zip(rows, np.split(values, places), strict=True):
                row[name][key] = part
    sequences = level_of(columns, "sequences")
    return [
        Trajectory(
            tokens=row["tokens"],
            sequence={key: value[place] for key, value in sequences.items()},
            turns=row.get("turns", {}),
            multimodal={
                name.removeprefix("multimodal."): part for name, part in row.items() if name.startswith("multimodal.")
            },
        )
        for place, row in enumerate(rows)
    ]


def level_of(columns: Mapping[str, _Numbers], name: str) -> dict[str, _Numbers]:
    """Return the columns of a level by key: `tokens`, `sequences`, `turns`, `multimodal.NAME` or `units`."""
    return {key.removeprefix(f"{name}."): values for key, values in columns.items() if key.startswith(f"{name}.")}


def pack_group(number: int, prompt_id: tuple[int, int], group_size: int, episodes: Mapping[int, Episode]) -> Columns:
    """Pack the episodes of one group, and add rewards and ids.

    Args:
        number: number of the group.
        prompt_id: data row and epoch.
        group_size: number of episodes of a complete group.
        episodes: one or more completed episodes, by sample index. A component of the reward that an episode does not
            have is NaN.
    """
    placed = [(row, part, episode) for row, episode in episodes.items() for part in range(len(episode.trajectories))]
    names = sorted({name for episode in episodes.values() for name in episode.rewards})
    integers = {
        "prompt_id": [prompt_id] * len(placed),
        "group_id": [number] * len(placed),
        "episode_id": [number * group_size + index for index, _, _ in placed],
        "sample_index": [index for index, _, _ in placed],
        "part_index": [part for _, part, _ in placed],
        "agent_id": [zlib.crc32(e.trajectories[n].agent_id.encode("utf-8", "backslashreplace")) for _, n, e in placed],
    }
    rewards = {"reward": [episode.reward + episode.trajectories[part].reward for _, part, episode in placed]}
    rewards |= {f"reward.{name}": [episode.rewards.get(name, math.nan) for _, _, episode in placed] for name in names}
    columns = pack([episode.trajectories[part] for _, part, episode in placed])
    columns |= {f"sequences.{key}": np.array(value, np.int64) for key, value in integers.items()}
    return columns | {f"sequences.{key}": np.array(value, np.float32) for key, value in rewards.items()}


def sampled_versions(columns: Mapping[str, Values]) -> list[int]:
    """Return the weight versions that sampled tokens, oldest first."""
    versions: list[int] = np.unique(columns["tokens.versions"][columns["tokens.loss_mask"]]).tolist()
    return versions


def column_layout(columns: Mapping[str, Values]) -> dict[str, str]:
    """Return the dtype and the shape of each value by column, such as `{"tokens.input_ids": "int64[]"}`.

    Lengths, and components of rewards, which may be missing, are left out.
    """
    named = {k: v for k, v in columns.items() if "/" not in k and not k.startswith("sequences.reward.")}
    return {key: _form(value.dtype, value.shape[1:]) for key, value in named.items()}


@cache
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype}{[*shape]}"


def to_bytes(columns: Mapping[str, Values]) -> bytes:
    """Encode columns as a safetensors buffer.

    The result equals that of the library, which takes ten times as long for the few kilobytes of a group. Columns of
    the widest numbers come first, so that every column is aligned.
    """
    header, parts, end = {}, [], 0
    for name, values in sorted(columns.items(), key=lambda item: (-item[1].itemsize, item[0])):
        parts.append(values.tobytes())
        begin, end = end, end + len(parts[-1])
        kind = _KINDS[values.dtype.kind] + ("" if values.dtype.kind == "b" else str(8 * values.itemsize))
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": (begin, end)}
    head = msgspec.json.encode(header)
    head = head.ljust((len(head) + 7) // 8 * 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def from_bytes(data: bytes) -> Columns:
    """Decode the result of `to_bytes`."""
    columns: Columns = load(data)
    return columns


def keys_in_common(rows: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """Return the keys that all rows have.

    Raises:
        ValueError: the keys of two rows differ. The message names the differing keys.
    """
    first = rows[0].keys()
    for row, other in enumerate(rows):
        if other.keys() != first:
            differing = sorted(first ^ other.keys())
            raise ValueError(
                f"row {row} of the batch differs from row 0 in keys {differing}: each must be in all or none"
            )
    return first
