"""Attention over packed sequences without a kernel of `areal_fsdp.attention.kernels`.

A packed batch has no batch dimension: it concatenates the tokens of all sequences, and no token attends to another
sequence. This module sorts sequences of similar length into buckets, pads each bucket's rows to one width, and computes
causal scaled dot-product attention. Padding exists only inside attention, at the end of a row, where the causal mask
hides it from all tokens.

All layers share the batch's `PackedLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORTEST_SHARE = 0.75
"""A row joins a bucket if it has at least this share of the bucket's width, minus `_ALWAYS_TOGETHER` tokens."""
_ALWAYS_TOGETHER = 16

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reach:
    """Arguments of a kernel: longest sequence, factor of the scores, tokens that a token attends to (0: all)."""

    longest: int
    scale: float
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Positions of the tokens of a packed batch, and their mapping to buckets of sequences of similar length.

    Attributes:
        lengths: tokens of each sequence.
        bounds: [B + 1] int32: sequence i is `bounds[i]:bounds[i + 1]`.
        position_ids: [T] int64, each token's position in its sequence, from 0.
        buckets: (rows, width) of each bucket, in descending order of width.
        padded_from_packed: [P] int64: index of the packed token at each position of the concatenated buckets; padding
            has index 0.
        packed_from_padded: [T] int64: position of each packed token in the concatenated buckets.
        padding: positions of padding, int64; None without padding.
        is_identity: True if the concatenated buckets equal the packed batch, so that no token moves.
    """

    lengths: tuple[int, ...]
    bounds: torch.Tensor
    position_ids: torch.Tensor
    buckets: tuple[tuple[int, int], ...]
    padded_from_packed: torch.Tensor
    packed_from_padded: torch.Tensor
    padding: torch.Tensor | None
    is_identity: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @classmethod
    def from_lengths(
        cls, lengths: torch.Tensor | Sequence[int], device: torch.device | str = "cpu", *, one_bucket: bool = False
    ) -> PackedLayout:
        """Make the layout of a batch.

        Args:
            lengths: [B], each at least 1.
            device: the tokens' device.
            one_bucket: put all sequences into one bucket, as wide as the longest.

        Raises:
            ValueError: there is no sequence, or a sequence is empty.
        """
        size = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if not len(size) or int(size.min()) < 1:
            raise ValueError(f"a packed layout needs sequences of at least one token, got lengths {size.tolist()}")
        offsets = F.pad(size.cumsum(0), (1, 0))
        total = int(offsets[-1])
        position_ids = torch.arange(total) - torch.repeat_interleave(offsets[:-1], size)
        order = torch.sort(size, descending=True, stable=True).indices
        buckets = [(len(size), int(size.max()))] if one_bucket else _plan_buckets(size[order].tolist())
        width = torch.repeat_interleave(*torch.tensor(buckets).T.flip(0))
        row_start = torch.empty_like(offsets[:-1])
        row_start[order] = F.pad(width.cumsum(0), (1, 0))[:-1]
        packed_from_padded = torch.repeat_interleave(row_start, size) + position_ids
        is_padding = torch.ones(int(width.sum()), dtype=torch.bool)
        is_padding[packed_from_padded] = False
        padded_from_packed = torch.zeros(len(is_padding), dtype=torch.int64)
        padded_from_packed[packed_from_padded] = torch.arange(total)
        padding = is_padding.nonzero()[:, 0]
        is_identity = not len(padding) and bool((padded_from_packed == torch.arange(total)).all())
        return cls(
            tuple(size.tolist()),
            offsets.to(device, torch.int32),
            position_ids.to(device),
            tuple(buckets),
            padded_from_packed.to(device),
            packed_from_padded.to(device),
            padding.to(device) if len(padding) else None,
            is_identity,
        )

    def rows_of(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return packed tokens [T, ...] as padded rows, [rows, width, ...] for each bucket."""
        padded: Any = packed if self.is_identity else _ToBuckets.apply(packed, self)  # type: ignore[no-untyped-call]
        parts = torch.split(padded, [rows * width for rows, width in self.buckets])
        return [part.view(*bucket, *part.shape[1:]) for part, bucket in zip(parts, self.buckets, strict=True)]

    def packed_of(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the packed tokens [T, ...] of padded rows, the inverse of `rows_of`."""
        parts = [part.flatten(0, 1) for part in rows]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return padded if self.is_identity else _FromBuckets.apply(padded, self)  # type: ignore[no-untyped-call]


def _plan_buckets(descending: list[int]) -> list[tuple[int, int]]:
    """Return (rows, width) of each bucket, for lengths in descending order.

    A row may be as short as three quarters of its bucket's width, minus a few tokens. Padding costs the square of the
    width, but each bucket costs a kernel call, which for short sequences is more expensive.
    """
    buckets: list[tuple[int, int]] = []
    for length in descending:
        if buckets and length >= _SHORTEST_SHARE * buckets[-1][1] - _ALWAYS_TOGETHER:
            rows, width = buckets[-1]
            buckets[-1] = (rows + 1, width)
        else:
            buckets.append((1, length))
    return buckets


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence.

    Args:
        query: [T, heads, head size], float32, bfloat16 or float16.
        key: [T, key heads, head size]; `heads` is a multiple of `key heads`, each serving consecutive query heads.
        value: [T, key heads, head size].
        layout: layout of this batch, on the same device.
        scale: factor of the scores; 1 / sqrt(head size) if None.
        window: number of tokens that a token attends to, including itself; all if None.
        sinks: [heads], for each head a score that takes part in the softmax and has no value (gpt-oss, arXiv
            2508.10925); None without sinks.

    Returns:
        [T, heads, head size] in the dtype of `query`, differentiable in all of these tensors.
    """
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for inputs in zip(*(layout.rows_of(tensor) for tensor in (query, key, value)), strict=True):
        q, k, v = (part.transpose(1, 2) for part in inputs)
        width = q.shape[2]
        mask = _window_mask(width, window, query.device) if window is not None and window < width else None
        if sinks is not None:
            k, v, mask = _with_sinks(k, v, _window_mask(width, width, query.device) if mask is None else mask, sinks)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(attended.transpose(1, 2))
    return layout.packed_of(outputs)


def _window_mask(width: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [width, width] bool, True where the row's token attends to the column's."""
    ones = torch.ones(width, width, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _with_sinks(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a key and a value of zeros, and return them with an additive mask [heads, width, width + 1].

    The mask's last column is the score of the sinks.
    """
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    scores = torch.zeros(mask.shape, dtype=key.dtype, device=key.device).masked_fill(~mask, -torch.inf)
    column = sinks.to(key.dtype)[:, None, None].expand(-1, len(mask), 1)
    return key, value, torch.cat([scores.expand(len(sinks), -1, -1), column], -1)


class _ToBuckets(torch.autograd.Function):
    """Maps packed tokens to buckets. Each token has one position in the buckets, so the gradient is a gather too.

    PyTorch's gradient of an indexing adds row by row, which on a CPU takes ten times as long as a gather. The gradient
    at padding is ignored: it is zero, because no token attends to padding, and padding's output is discarded.
    """

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.padded_from_packed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.layout.packed_from_padded), None


class _FromBuckets(torch.autograd.Function):
    """Maps buckets to packed tokens; the gradient at padding is zero."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        ctx.layout = layout
        return padded.index_select(0, layout.packed_from_padded)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        padded = gradient.index_select(0, layout.padded_from_packed)
        if layout.padding is not None:
            padded.index_fill_(0, layout.padding, 0)
        return padded, None
