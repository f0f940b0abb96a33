"""Keys and values of the sequences under way: a row for each, live rows always in front."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

ROUND = 32
"""Lengths are rounded up to this, so that shapes change seldom."""


def rounded(length: int) -> int:
    """The next multiple of ROUND."""
    return -(-length // ROUND) * ROUND


class RowCache(Cache):
    """A cache of `rows` sequences for one-token steps of all live rows.

    The rows 0..live-1 are live. A step appends the keys and values of one token to each, at `lengths` of its row;
    attention sees the first `width` positions and masks what lies behind a row's own length.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._capacity = (0, 0)
        self.live = 0
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._width = 0

    def begin_step(self, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Prepare a step in which row i appends at `lengths[i]`.

        Args:
            lengths: [live] int64.
            longest: the largest of them.

        Returns:
            The attention mask, [live, 1, 1, width] bool.
        """
        self.lengths = lengths
        self._width = rounded(longest + 1)
        self._reserve(self.live, self._width)
        self._rows = torch.arange(self.live, device=lengths.device)
        positions = torch.arange(self._width, device=lengths.device)
        return (positions <= lengths[:, None])[:, None, None, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token's [live, heads, 1, size] and return what attention sees, [live, heads, width, size]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert keys is not None
        assert values is not None
        keys[self._rows, :, self.lengths] = key_states[:, :, 0]
        values[self._rows, :, self.lengths] = value_states[:, :, 0]
        return keys[: self.live, :, : self._width], values[: self.live, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given to the model explicitly."""
        return 0

    def write(self, first: int, prefilled: Cache, padding: torch.Tensor) -> None:
        """Put the keys and values of left-padded sequences into the rows from `first` on.

        Args:
            first: row of the first of them.
            prefilled: [count, heads, length, size] in each layer.
            padding: [count] int64, padded positions in front of each.
        """
        for index, layer in enumerate(prefilled.layers):
            keys, values = layer.keys, layer.values
            count, heads, length, size = keys.shape
            if self._keys[index] is None:
                self._keys[index] = keys.new_zeros(0, heads, 0, size)
                self._values[index] = values.new_zeros(0, heads, 0, values.shape[-1])
            self._reserve_layer(index, first + count, rounded(length + 1))
            if bool(padding.any()):
                shifted = (torch.arange(length, device=keys.device) + padding[:, None]).clamp_(max=length - 1)
                shifted = shifted[:, None, :, None]
                keys = keys.gather(2, shifted.expand(-1, heads, -1, size))
                values = values.gather(2, shifted.expand(-1, heads, -1, values.shape[-1]))
            self._keys[index][first : first + count, :, :length] = keys  # type: ignore[index]
            self._values[index][first : first + count, :, :length] = values  # type: ignore[index]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows over rows that have ended."""
        for layers in (self._keys, self._values):
            for layer in layers:
                assert layer is not None
                layer[targets] = layer[sources]

    def _reserve(self, rows: int, width: int) -> None:
        for index in range(len(self._keys)):
            self._reserve_layer(index, rows, width)

    def _reserve_layer(self, index: int, rows: int, width: int) -> None:
        """Make room; rows grow by half so that joins seldom copy."""
        for layers in (self._keys, self._values):
            old = layers[index]
            assert old is not None
            if old.shape[0] >= rows and old.shape[2] >= width:
                continue
            grown_rows = max(old.shape[0], rows + rows // 2 if rows > old.shape[0] else rows)
            new = old.new_zeros(grown_rows, old.shape[1], max(old.shape[2], width), old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            layers[index] = new
