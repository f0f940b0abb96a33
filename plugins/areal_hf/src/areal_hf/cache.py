"""KV cache of the live requests: each has a row, new rows are appended, and the last rows replace those that leave.

Row r of each layer's tensors has the tokens of request r from column 0 on. Columns beyond a row's length contain
garbage, which the mask hides. The tensors grow by doubling the rows and by whole blocks of columns. They are freed when
no request is live. The scheduler bounds the memory when it admits requests.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

BLOCK = 32
"""Columns are allocated in multiples of this."""

_STEP = 16
"""The width of attention is a multiple of this, which needs fewer kernel shapes and wastes little."""


def rounded(length: int, multiple: int = BLOCK) -> int:
    """Return `length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, each [rows, heads, columns, size]. They are allocated at the first update."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self._owner = owner
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate tensors of the owner's capacity, with the shape, dtype and device of the first states."""
        self._keys = self._allocate(key_states)
        self._values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        rows, columns = self._owner.capacity
        # Zeros, because a masked column is still multiplied, and NaN times 0 is NaN.
        return states.new_zeros((rows, states.shape[1], columns, states.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states where the owner's current step puts them. Return the keys and values to attend to."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        if owner.filling is not None:
            start, source = owner.filling
            for stored, states in ((self._keys, key_states), (self._values, value_states)):
                target = stored[start : start + len(source), :, : states.shape[2]]
                target.copy_(states if len(source) == len(states) else states.index_select(0, source))
            return key_states, value_states
        rows, width = owner.attended
        for stored, states in ((self._keys, key_states), (self._values, value_states)):
            index = owner.write_index(stored.shape[1])
            stored.view(-1, stored.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return self._keys[:rows, :, :width], self._values[:rows, :, :width]

    def resize(self, keep_rows: int, keep_columns: int) -> None:
        """Change to the owner's capacity. The first rows and columns keep their contents."""
        if not self.is_initialized:
            return
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = self._allocate(old)
            new[:keep_rows, :, :keep_columns] = old[:keep_rows, :, :keep_columns]
            setattr(self, name, new)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
        """Copy the first columns of rows `sources` [M] over rows `targets` [M]."""
        for stored in (self._keys, self._values):
            view = stored[:, :, :columns]
            view.index_copy_(0, targets, view.index_select(0, sources))

    def reset(self) -> None:
        """Free the memory."""
        self._keys = self._values = torch.empty(0)
        self.is_initialized = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one column of one row in this layer."""
        return sum(r.shape[1] * r.shape[3] * r.element_size() for r in (self._keys, self._values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for Hugging Face's masks, which are not used: the scheduler passes its own masks."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0. Models ask for it to compute positions, but the scheduler passes the positions."""
        return 0

    def get_max_length(self) -> int:
        """Return -1, as Hugging Face's growing caches do: only memory limits the number of columns."""
        return -1


class RowCache(Cache):
    """The cache of all layers. A forward either fills rows from prompts, or appends one token to each row."""

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
        """See `Cache.update`. Each attention layer calls it, with states [B, heads, T, size]."""
        return self._row_layers[layer_idx].update(key_states, value_states)

    def fill(self, start: int, source: torch.Tensor) -> None:
        """Prepare a forward over prompts: row `start + i` takes the states of its batch row `source[i]`.

        These rows must be empty. The forward attends only to its own states.
        """
        self.filling = (start, source)

    def append(self, lengths: torch.Tensor, width: int) -> None:
        """Prepare a forward over one token of each of the first rows.

        Args:
            lengths: number of tokens that each row has, [B] int64. It is the column of the new token.
            width: number of columns that attention uses; see `attended_width`.
        """
        self.filling = None
        self._positions = lengths
        self._write_index.clear()
        self.attended = (len(lengths), width)

    def write_index(self, heads: int) -> torch.Tensor:
        """Return [B * heads] int64: each current token's index in a layer's tensors, as [rows * heads * columns]."""
        index = self._write_index.get(heads)
        if index is None:
            columns = self.capacity[1]
            first = torch.arange(0, len(self._positions) * heads * columns, columns, device=self._positions.device)
            index = (first.view(-1, heads) + self._positions.unsqueeze(1)).view(-1)
            self._write_index[heads] = index
        return index

    def attended_width(self, longest: int) -> int:
        """Return the number of columns that attention uses if the longest row has `longest` tokens before this one."""
        return min(rounded(longest + 1, _STEP), self.capacity[1])

    def fit(self, rows: int, columns: int, live_rows: int, live_columns: int, most_rows: int) -> None:
        """Allocate at least so many rows and columns, and free memory that is far more. Live contents are kept.

        Args:
            rows, columns: the needed capacity.
            live_rows, live_columns: the part with live tokens.
            most_rows: largest number of rows that is allocated in advance.
        """
        old_rows, old_columns = self.capacity
        new_rows, new_columns = old_rows, old_columns
        if columns > old_columns or rounded(columns) * 2 < old_columns:
            new_columns = rounded(columns)
        if rows > old_rows:
            new_rows = max(rows, min(2 * old_rows, most_rows))
        elif old_rows > max(rows, most_rows):
            # If rows are wider, fewer of them fit into the memory.
            new_rows = max(rows, most_rows)
        if (new_rows, new_columns) == (old_rows, old_columns):
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
        """Free all memory."""
        self.capacity = (0, 0)
        for layer in self._row_layers:
            layer.reset()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row in all layers; 0 before the first forward."""
        return sum(layer.bytes_per_token for layer in self._row_layers if layer.is_initialized)
