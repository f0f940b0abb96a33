"""Many sequences of different lengths in one batch, without padding.

The values of a key are stored flat, one sequence behind another, with one set of lengths for all keys of a level. The
same form goes over every channel, into the ledger and to the trainer's ranks: a safetensors buffer of flat values and
lengths.
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
    """Flat values of several keys that share one set of row lengths.

    Attributes:
        lengths: [B] int64.
        values: by key, [sum(lengths), ...].

    Raises:
        ValueError: a key's values are not as long as the lengths say.
    """

    lengths: torch.Tensor
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for key, value in self.values.items():
            if len(value) != total:
                raise ValueError(f"key '{key}' holds {len(value)} values, the lengths of the rows add up to {total}")

    @property
    def offsets(self) -> torch.Tensor:
        """[B + 1] int64: row i is `offsets[i]:offsets[i + 1]`."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def row_index(self) -> torch.Tensor:
        """[sum(lengths)] int64: the row that each value belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    def rows(self) -> list[dict[str, torch.Tensor]]:
        """The values of each row by key, as views."""
        lengths = self.lengths.tolist()
        columns = {key: torch.split(value, lengths) for key, value in self.values.items()}
        return [{key: column[row] for key, column in columns.items()} for row in range(len(lengths))]

    def select(self, rows: torch.Tensor) -> Ragged:
        """These rows, in this order."""
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        within = Ragged(lengths)
        index = torch.arange(int(lengths.sum()), device=lengths.device)
        index += torch.repeat_interleave(starts - within.offsets[:-1], lengths)
        return Ragged(lengths, {key: value[index] for key, value in self.values.items()})

    def to(self, device: torch.device | str) -> Ragged:
        """The same on another device."""
        return Ragged(self.lengths.to(device), {key: value.to(device) for key, value in self.values.items()})

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order; every part must have the same keys."""
        lengths = torch.cat([part.lengths for part in parts])
        return Ragged(lengths, _concatenate_columns([part.values for part in parts]))


@dataclass(slots=True)
class PackedBatch:
    """Packed sequences with values of each token, of each turn, of the whole sequence and of each unit of sequences.

    A unit is what belongs together, such as the two sides of a preference or the sequences of a chat: its sequences
    stay together in every split.

    Attributes:
        tokens: per-token values, flat [sum(T), ...]; `input_ids` is always among them.
        sequences: per-sequence values, [B, ...].
        turns: per-turn values, flat [sum(turns), ...].
        multimodal: values of further things that a sequence has some of, such as its images, by what they are; flat.
        units: per-unit values, [U, ...].
        unit_index: [B] int64, the unit of each sequence, from 0 to U - 1; None where every sequence is its own.
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
        """The flat values of a token key, or else the values of a sequence key, a turn key or a unit key.

        Raises:
            KeyError: the batch has no such key; the message lists those it has.
        """
        for values in self._levels():
            if key in values:
                return values[key]
        raise KeyError(f"the batch has no key '{key}'; it has {sorted(k for level in self._levels() for k in level)}")

    def get(self, key: str) -> torch.Tensor | None:
        """As indexing, None where the batch has no such key."""
        return next((values[key] for values in self._levels() if key in values), None)

    def __contains__(self, key: object) -> bool:
        return any(key in values for values in self._levels())

    def _levels(self) -> list[dict[str, torch.Tensor]]:
        turns = self.turns.values if self.turns is not None else {}
        return [self.tokens.values, self.sequences, turns, self.units, *(lv.values for lv in self.multimodal.values())]

    @property
    def lengths(self) -> torch.Tensor:
        """[B] int64, tokens of each sequence."""
        return self.tokens.lengths

    @property
    def unit_count(self) -> int:
        """How many units there are."""
        if self.unit_index is None:
            return len(self)
        return int(self.unit_index.max()) + 1 if len(self) else 0

    @property
    def unit_rows(self) -> list[list[int]]:
        """The sequences of each unit, in order."""
        if self.unit_index is None:
            return [[row] for row in range(len(self))]
        rows: list[list[int]] = [[] for _ in range(self.unit_count)]
        for row, unit in enumerate(self.unit_index.tolist()):
            rows[unit].append(row)
        return rows

    @property
    def token_count(self) -> int:
        """Tokens in the whole batch."""
        return len(self.tokens.values["input_ids"])

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Pack trajectories, in order. All must carry the same keys.

        Raises:
            ValueError: there are none, or their keys differ (the message names the odd ones).
        """
        return cls.from_columns(packing.pack(trajectories))

    def to_trajectories(self) -> list[Trajectory]:
        """The sequences one by one, as views into this batch; units are not among what they know."""
        return packing.unpack(self.columns())

    def with_tokens(self, **values: torch.Tensor) -> PackedBatch:
        """A batch with these per-token values added or replaced; the other tensors are shared."""
        tokens = Ragged(self.tokens.lengths, {**self.tokens.values, **values})
        return replace(self, tokens=tokens)

    def with_sequences(self, **values: torch.Tensor) -> PackedBatch:
        """A batch with these per-sequence values added or replaced; the other tensors are shared."""
        return replace(self, sequences={**self.sequences, **values})

    def with_columns(self, columns: Mapping[str, torch.Tensor]) -> PackedBatch:
        """A batch with these columns added or replaced, each at the level whose length it has: [T], [B] or [U].

        Raises:
            ValueError: a column is as long as none of them.
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
        """A batch whose sequences belong to these units, None where each is its own, with these per-unit values."""
        return replace(self, units=values, unit_index=unit_index)

    def select(self, rows: torch.Tensor | Sequence[int]) -> PackedBatch:
        """These sequences, in this order."""
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
        """The same on another device."""
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
        """The sequences of all batches, in order; every batch must have the same keys."""
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
        """The values by name, as NumPy sees them: in the same memory where that is the CPU's."""
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
        """The batch of some columns, in the same memory. The lengths are checked against every key."""
        flat = {name: torch.from_numpy(values) for name, values in columns.items()}
        level = partial(packing.level_of, flat)
        turns = Ragged(flat["turns/lengths"], level("turns")) if "turns/lengths" in flat else None
        tokens = Ragged(flat["tokens/lengths"], level("tokens"))
        found = [key.removeprefix("multimodal.") for key in flat if key.startswith("multimodal.") and "/" in key]
        named = [key.removesuffix("/lengths") for key in found]
        multimodal = {name: Ragged(flat[f"multimodal.{name}/lengths"], level(f"multimodal.{name}")) for name in named}
        return cls(tokens, level("sequences"), turns, level("units"), flat.get("units/index"), multimodal)

    def to_bytes(self) -> bytes:
        """The batch as one safetensors buffer."""
        return packing.to_bytes(self.columns())

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedBatch:
        """Read back what `to_bytes` wrote, or the record of a group. The lengths are checked again."""
        return cls.from_columns(packing.from_bytes(data))


def join_batches(parts: Sequence[PackedBatch]) -> PackedBatch | None:
    """Return the sequences of all parts in order, or None if there are none.

    A named reward that judged nothing in a part is NaN there.
    """
    names = {key for part in parts for key in part.sequences if key.startswith("reward.")}
    same = [p.with_sequences(**{key: torch.full((len(p),), torch.nan) for key in names if key not in p}) for p in parts]
    return PackedBatch.concatenate(same) if same else None


def _concatenate_units(batches: Sequence[PackedBatch]) -> torch.Tensor | None:
    """The units of all batches, one behind another; None where none of them has units of several sequences."""
    if all(batch.unit_index is None for batch in batches):
        return None
    indices, start = [], 0
    for batch in batches:
        own = torch.arange(len(batch), device=batch.lengths.device) if batch.unit_index is None else batch.unit_index
        indices.append(own + start)
        start += batch.unit_count
    return torch.cat(indices)


def _concatenate_columns(columns: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([column[key] for column in columns]) for key in packing.keys_in_common(columns)}
