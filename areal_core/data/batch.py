"""Batches of sequences of different lengths, without padding.

The values of a key are concatenated along the first dimension. All keys of one level (tokens, turns, images) share one
set of lengths. Segments and messages have the same form: a safetensors buffer of flat values and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from areal_core.data import packing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data.trajectory import Trajectory


@dataclass(slots=True)
class Ragged:
    """Concatenated rows of several keys that share one set of row lengths.

    Attributes:
        lengths: number of values in each row, [B] int64.
        values: values of each key, [sum(lengths), ...].

    Raises:
        ValueError: a key does not have sum(lengths) values.

    Example:
        >>> ragged = Ragged(torch.tensor([2, 1]), {"input_ids": torch.tensor([5, 6, 7])})
        >>> [row["input_ids"].tolist() for row in ragged.rows()]
        [[5, 6], [7]]
    """

    lengths: torch.Tensor
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for key, value in self.values.items():
            if len(value) != total:
                raise ValueError(f"key '{key}' has {len(value)} values, and the lengths of the rows add up to {total}")

    @property
    def offsets(self) -> torch.Tensor:
        """Start of each row, and the end of the last: row i is `offsets[i]:offsets[i + 1]`. Shape [B + 1], int64."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def row_index(self) -> torch.Tensor:
        """Row of each value, [sum(lengths)] int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    def rows(self) -> list[dict[str, torch.Tensor]]:
        """Return the values of each row by key, as views."""
        lengths = self.lengths.tolist()
        columns = {key: torch.split(value, lengths) for key, value in self.values.items()}
        return [{key: column[row] for key, column in columns.items()} for row in range(len(lengths))]

    def select(self, rows: torch.Tensor) -> Ragged:
        """Return a copy of the rows with these indices [N] int64, in this order."""
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        within = Ragged(lengths)
        index = torch.arange(int(lengths.sum()), device=lengths.device)
        index += torch.repeat_interleave(starts - within.offsets[:-1], lengths)
        return Ragged(lengths, {key: value[index] for key, value in self.values.items()})

    def to(self, device: torch.device | str) -> Ragged:
        """Return a copy on a device."""
        return Ragged(self.lengths.to(device), {key: value.to(device) for key, value in self.values.items()})

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts, which must have the same keys."""
        lengths = torch.cat([part.lengths for part in parts])
        return Ragged(lengths, _concatenate_columns([part.values for part in parts]))


@dataclass(slots=True)
class PackedBatch:
    """Packed sequences with values per token, per turn, per sequence and per unit.

    A unit is a set of sequences that every split keeps together, such as the two sides of a preference or the
    trajectories of one episode.

    Attributes:
        tokens: values per token, [sum(T), ...]. The key `input_ids` is required.
        sequences: values per sequence, [B, ...].
        turns: values per turn, [sum(turns), ...].
        multimodal: further values with lengths of their own, by what they describe, such as `images`.
        units: values per unit, [U, ...].
        unit_index: unit of each sequence, from 0 to U - 1, [B] int64; None if each sequence is a unit.
    """

    tokens: Ragged
    sequences: dict[str, torch.Tensor] = field(default_factory=dict)
    turns: Ragged | None = None
    units: dict[str, torch.Tensor] = field(default_factory=dict)
    unit_index: torch.Tensor | None = None
    multimodal: dict[str, Ragged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, level in self.multimodal.items():
            if len(level.lengths) != len(self):
                raise ValueError(f"{name} are given for {len(level.lengths)} of {len(self)} sequences")
        if self.unit_index is not None and len(self.unit_index) != len(self):
            raise ValueError(f"units are given for {len(self.unit_index)} of {len(self)} sequences")
        for key, value in self.units.items():
            if len(value) != self.unit_count:
                raise ValueError(f"key '{key}' has {len(value)} values for {self.unit_count} units")
        for key, value in self.sequences.items():
            if len(value) != len(self):
                raise ValueError(f"key '{key}' has {len(value)} values for {len(self)} sequences")
        if self.turns is not None and len(self.turns.lengths) != len(self):
            raise ValueError(f"turns are given for {len(self.turns.lengths)} of {len(self)} sequences")

    def __len__(self) -> int:
        return len(self.tokens.lengths)

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the values of a key per token, sequence, turn, unit or multimodal value, in this order.

        Raises:
            KeyError: the batch has no such key. The message lists its keys.
        """
        for values in self._levels():
            if key in values:
                return values[key]
        raise KeyError(f"the batch has no key '{key}'; it has {sorted(k for level in self._levels() for k in level)}")

    def get(self, key: str) -> torch.Tensor | None:
        """Return the values of a key like `batch[key]`; None if the batch has no such key."""
        return next((values[key] for values in self._levels() if key in values), None)

    def __contains__(self, key: object) -> bool:
        return any(key in values for values in self._levels())

    def _levels(self) -> list[dict[str, torch.Tensor]]:
        turns = self.turns.values if self.turns is not None else {}
        return [self.tokens.values, self.sequences, turns, self.units, *(lv.values for lv in self.multimodal.values())]

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of each sequence, [B] int64."""
        return self.tokens.lengths

    @property
    def unit_count(self) -> int:
        """Number of units."""
        if self.unit_index is None:
            return len(self)
        return int(self.unit_index.max()) + 1 if len(self) else 0

    @property
    def unit_rows(self) -> list[list[int]]:
        """Indices of the sequences of each unit, in order."""
        if self.unit_index is None:
            return [[row] for row in range(len(self))]
        rows: list[list[int]] = [[] for _ in range(self.unit_count)]
        for row, unit in enumerate(self.unit_index.tolist()):
            rows[unit].append(row)
        return rows

    @property
    def token_count(self) -> int:
        """Number of tokens in the batch."""
        return len(self.tokens.values["input_ids"])

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Pack trajectories in order. All must have the same keys.

        Raises:
            ValueError: there are no trajectories, or their keys differ. The message names the differing keys.
        """
        return cls.from_columns(packing.pack(trajectories))

    def to_trajectories(self) -> list[Trajectory]:
        """Return the sequences as trajectories, which are views into this batch. They have no units."""
        return packing.unpack(self.columns())

    def with_tokens(self, **values: torch.Tensor) -> PackedBatch:
        """Return a batch with these values per token added or replaced. The other tensors are shared."""
        tokens = Ragged(self.tokens.lengths, {**self.tokens.values, **values})
        return replace(self, tokens=tokens)

    def with_sequences(self, **values: torch.Tensor) -> PackedBatch:
        """Return a batch with these values per sequence added or replaced. The other tensors are shared."""
        return replace(self, sequences={**self.sequences, **values})

    def with_columns(self, columns: Mapping[str, torch.Tensor]) -> PackedBatch:
        """Return a batch with these columns added or replaced, per token, sequence or unit by their lengths.

        Raises:
            ValueError: a column has the length of none of them.
        """
        batch = self
        for name, values in columns.items():
            if len(values) == self.token_count:
                batch = batch.with_tokens(**{name: values})
            elif len(values) == len(self):
                batch = batch.with_sequences(**{name: values})
            elif len(values) == self.unit_count:
                batch = batch.with_units(batch.unit_index, **{**batch.units, name: values})
            else:
                counts = f"{self.token_count} tokens, {len(self)} sequences and {self.unit_count} units"
                raise ValueError(f"column '{name}' has {len(values)} values for {counts}")
        return batch

    def with_units(self, unit_index: torch.Tensor | None, **values: torch.Tensor) -> PackedBatch:
        """Return a batch with these units (see `unit_index`) and values per unit."""
        return replace(self, units=values, unit_index=unit_index)

    def select(self, rows: torch.Tensor | Sequence[int]) -> PackedBatch:
        """Return a copy of the sequences with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device)
        kept, unit_index = index, None
        if self.unit_index is not None:
            kept, unit_index = torch.unique(self.unit_index[index], return_inverse=True)
        return PackedBatch(
            self.tokens.select(index),
            {key: value[index] for key, value in self.sequences.items()},
            self.turns.select(index) if self.turns is not None else None,
            {key: value[kept] for key, value in self.units.items()},
            unit_index,
            {name: level.select(index) for name, level in self.multimodal.items()},
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return a copy on a device."""
        return PackedBatch(
            self.tokens.to(device),
            {key: value.to(device) for key, value in self.sequences.items()},
            self.turns.to(device) if self.turns is not None else None,
            {key: value.to(device) for key, value in self.units.items()},
            self.unit_index.to(device) if self.unit_index is not None else None,
            {name: level.to(device) for name, level in self.multimodal.items()},
        )

    @staticmethod
    def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
        """Concatenate the sequences of all batches, which must have the same keys."""
        turns = [batch.turns for batch in batches if batch.turns is not None]
        if turns and len(turns) != len(batches):
            raise ValueError(f"turn keys are given in {len(turns)} of {len(batches)} batches")
        names = packing.keys_in_common([batch.multimodal for batch in batches])
        return PackedBatch(
            Ragged.concatenate([batch.tokens for batch in batches]),
            _concatenate_columns([batch.sequences for batch in batches]),
            Ragged.concatenate(turns) if turns else None,
            _concatenate_columns([batch.units for batch in batches]),
            _concatenate_units(batches),
            {name: Ragged.concatenate([batch.multimodal[name] for batch in batches]) for name in names},
        )

    def columns(self) -> packing.Columns:
        """Return the values by name as NumPy arrays, which share memory with tensors on the CPU."""
        flat = {"tokens/lengths": self.tokens.lengths}
        flat |= {f"tokens.{key}": value for key, value in self.tokens.values.items()}
        flat |= {f"sequences.{key}": value for key, value in self.sequences.items()}
        if self.turns is not None:
            flat["turns/lengths"] = self.turns.lengths
            flat |= {f"turns.{key}": value for key, value in self.turns.values.items()}
        for name, level in self.multimodal.items():
            flat |= {f"multimodal.{name}/lengths": level.lengths}
            flat |= {f"multimodal.{name}.{key}": value for key, value in level.values.items()}
        flat |= {f"units.{key}": value for key, value in self.units.items()}
        if self.unit_index is not None:
            flat["units/index"] = self.unit_index
        return {name: tensor.numpy(force=True) for name, tensor in flat.items()}

    @classmethod
    def from_columns(cls, columns: packing.Columns) -> PackedBatch:
        """Create a batch from columns, sharing their memory. The lengths are checked against every key."""
        flat = {name: torch.from_numpy(values) for name, values in columns.items()}
        level = partial(packing.level_of, flat)
        turns = Ragged(flat["turns/lengths"], level("turns")) if "turns/lengths" in flat else None
        tokens = Ragged(flat["tokens/lengths"], level("tokens"))
        lengths = [key.removeprefix("multimodal.") for key in flat if key.startswith("multimodal.") and "/" in key]
        names = [key.removesuffix("/lengths") for key in lengths]
        multimodal = {name: Ragged(flat[f"multimodal.{name}/lengths"], level(f"multimodal.{name}")) for name in names}
        return cls(tokens, level("sequences"), turns, level("units"), flat.get("units/index"), multimodal)

    def to_bytes(self) -> bytes:
        """Encode the batch as a safetensors buffer."""
        return packing.to_bytes(self.columns())

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedBatch:
        """Decode the result of `to_bytes`, or the record of a group. The lengths are checked."""
        return cls.from_columns(packing.from_bytes(data))


def join_batches(parts: Sequence[PackedBatch]) -> PackedBatch | None:
    """Concatenate the sequences of all parts; return None if there are no parts.

    A component of the reward that a part does not have is NaN there.
    """
    names = {key for part in parts for key in part.sequences if key.startswith("reward.")}
    completed = [
        part.with_sequences(**{key: torch.full((len(part),), torch.nan) for key in names if key not in part})
        for part in parts
    ]
    return PackedBatch.concatenate(completed) if completed else None


def _concatenate_units(batches: Sequence[PackedBatch]) -> torch.Tensor | None:
    """Return the unit of each sequence of all batches; None if no batch has a `unit_index`."""
    if all(batch.unit_index is None for batch in batches):
        return None
    indices, start = [], 0
    for batch in batches:
        index = torch.arange(len(batch), device=batch.lengths.device) if batch.unit_index is None else batch.unit_index
        indices.append(index + start)
        start += batch.unit_count
    return torch.cat(indices)


def _concatenate_columns(columns: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([column[key] for column in columns]) for key in packing.keys_in_common(columns)}
