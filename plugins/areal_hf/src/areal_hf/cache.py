"""Keys and values of the live requests: one row for each, joined at the end and compacted when rows leave.

Row r of every layer's tensors holds request r's tokens from column 0 on; what lies behind a row's length is garbage
that the mask hides. The tensors grow by doubling rows and by whole blocks of columns, and are dropped when nothing is
live, so that memory follows what runs. The bound on memory is kept by whoever admits requests, with `bytes_needed`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

BLOCK = 32
"""Columns are allocated in multiples of this."""

_STEP = 16
"""Attention looks at a multiple of so many columns: fewer shapes for the kernels, little waste."""


def rounded(length: int, multiple: int = BLOCK) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, each [rows, heads, columns, size]; made at the first update."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self._owner = owner
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room of the owner's size, in the shape, dtype and device of the first states."""
        self._keys = self._room(key_states)
        self._values = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: torch.Tensor) -> torch.Tensor:
        rows, columns = self._owner.capacity
        # Zeros, not garbage: a masked column still enters the product, and NaN times 0 is NaN.
        return states.new_zeros((rows, states.shape[1], columns, states.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states where the owner's current step says, and return what attention is to look at."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        if owner.filling is not None:
            start, source = owner.filling
            for room, states in ((self._keys, key_states), (self._values, value_states)):
                target = room[start : start + len(source), :, : states.shape[2]]
                target.copy_(states if len(source) == len(states) else states.index_select(0, source))
            return key_states, value_states
        rows, width = owner.attended
        for room, states in ((self._keys, key_states), (self._values, value_states)):
            index = owner.write_index(room.shape[1])
            room.view(-1, room.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return self._keys[:rows, :, :width], self._values[:rows, :, :width]

    def resize(self, keep_rows: int, keep_columns: int) -> None:
        """Take on the owner's new size; the first rows and columns keep their contents."""
        if not self.is_initialized:
            return
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = self._room(old)
            new[:keep_rows, :, :keep_columns] = old[:keep_rows, :, :keep_columns]
            setattr(self, name, new)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
        """Copy rows [M] over other rows [M]."""
        for room in (self._keys, self._values):
            view = room[:, :, :columns]
            view.index_copy_(0, targets, view.index_select(0, sources))

    def reset(self) -> None:
        """Give the memory back."""
        self._keys = self._values = torch.empty(0)
        self.is_initialized = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one column of one row takes here."""
        return sum(r.shape[1] * r.shape[3] * r.element_size() for r in (self._keys, self._values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Asked by Hugging Face's own masks, which are not used: the scheduler passes the mask ready made."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Asked where positions are not given; the scheduler gives them."""
        return 0

    def get_max_length(self) -> int:
        """Columns are limited by memory alone: -1, as in Hugging Face's growing caches."""
        return -1


class RowCache(Cache):
    """The cache of all layers, in one of two states: filling rows from prompts, or appending one token to each row."""

    def __init__(self, layers: int) -> None:
        self.capacity = (0, 0)
        self.filling: tuple[int, torch.Tensor] | None = None
        self.attended = (0, 0)
        self._positions = torch.empty(0)
        self._write_index: dict[int, torch.Tensor] = {}
        self._row_layers = [RowLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._row_layers))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer, states [B, heads, T, size]; returns what it is to attend to."""
        return self._row_layers[layer_idx].update(key_states, value_states)

    def fill(self, start: int, source: torch.Tensor) -> None:
        """The next forward brings prompts: row `start + i` takes the states of its batch row `source[i]`.

        Nothing may be cached before in those rows. The forward attends to its own states alone.
        """
        self.filling = (start, source)

    def append(self, lengths: torch.Tensor, width: int) -> None:
        """The next forward brings one token for each of the first rows, at column `lengths` [B] int64.

        Args:
            lengths: how many tokens each row holds.
            width: columns that attention looks at, see `attended_width`.
        """
        self.filling = None
        self._positions = lengths
        self._write_index.clear()
        self.attended = (len(lengths), width)

    def write_index(self, heads: int) -> torch.Tensor:
        """[B * heads] int64: where the current token lies in a layer's tensors seen as [rows * heads * columns]."""
        index = self._write_index.get(heads)
        if index is None:
            columns = self.capacity[1]
            first = torch.arange(0, len(self._positions) * heads * columns, columns, device=self._positions.device)
            index = (first.view(-1, heads) + self._positions.unsqueeze(1)).view(-1)
            self._write_index[heads] = index
        return index

    def attended_width(self, longest: int) -> int:
        """Columns to look at when the longest row holds `longest` tokens before this one."""
        return min(rounded(longest + 1, _STEP), self.capacity[1])

    def fit(self, rows: int, columns: int, live_rows: int, live_columns: int, most_rows: int) -> None:
        """Have room for so many rows and columns, and not for many more; live contents are kept.

        Args:
            rows, columns: what is needed now.
            live_rows, live_columns: what holds tokens.
            most_rows: room for more is not made in advance.
        """
        had_rows, had_columns = self.capacity
        new_rows, new_columns = had_rows, had_columns
        if columns > had_columns or rounded(columns) * 2 < had_columns:
            new_columns = rounded(columns)
        if rows > had_rows:
            new_rows = max(rows, min(2 * had_rows, most_rows))
        elif had_rows > max(rows, most_rows):
            # Wider rows leave memory for fewer of them.
            new_rows = max(rows, most_rows)
        if (new_rows, new_columns) == (had_rows, had_columns):
            return
        self.capacity = (new_rows, new_columns)
        for layer in self._row_layers:
            layer.resize(min(live_rows, new_rows), min(live_columns, new_columns))

    def move(self, sources: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
        """Copy the first `columns` columns of rows `sources` [M] over rows `targets` [M], in every layer."""
        for layer in self._row_layers:
            if layer.is_initialized:
                layer.move(sources, targets, columns)

    def reset(self) -> None:
        """Give all memory back."""
        self.capacity = (0, 0)
        for layer in self._row_layers:
            layer.reset()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes in all layers; 0 before the first forward."""
        return sum(layer.bytes_per_token for layer in self._row_layers if layer.is_initialized)
