"""Packed attention for Hugging Face models, through transformers' attention interface.

In compiled layers, attention is one operation of the graph, `areal_attention::attention`. It takes the lengths of a
batch's sequences as tensors of dynamic size, so that no batch triggers a recompilation. The operation reads the longest
length from host memory when it runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from areal_core.errors import RunError
from areal_fsdp.attention.kernels import kernel_for
from areal_fsdp.attention.packed import PackedLayout, Reach, packed_attention
from areal_fsdp.parallel.context import heads_to_tokens, tokens_to_heads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PACKED = "areal_packed"
"""Name of this attention in transformers' registry."""
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""transformers' names of the bounds of packed sequences, for layers that mix tokens outside attention."""

_NOT_COMPUTED = ("softcap", "position_bias")


class GraphLayout(NamedTuple):
    """Bounds of a packed batch's sequences, in the form that compiled graphs and kernels need.

    Attributes:
        bounds: [B + 1] int32, on the device: sequence i is `bounds[i]:bounds[i + 1]`.
        host_bounds: the same values in host memory.
        kernel: name of the model's attention kernel for half precision on a GPU.
    """

    bounds: torch.Tensor
    host_bounds: torch.Tensor
    kernel: str


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions and bounds of the sequences of a packed batch.

    Attributes:
        position_ids: [T] int64, each token's position in its sequence.
        packed: layout for attention.
        in_rows: True if the model computes a padded row for each sequence; `packed` has one bucket with these rows.
    """

    position_ids: torch.Tensor
    packed: PackedLayout | GraphLayout
    in_rows: bool = False

    @classmethod
    def of(
        cls,
        lengths: torch.Tensor | Sequence[int],
        device: torch.device,
        kernel: str = "",
        *,
        multiple: int = 1,
        in_rows: bool = False,
    ) -> Layout:
        """Make the layout of a batch without waiting for the device.

        Args:
            lengths: [B], in host memory; each at least 1.
            device: the tokens' device.
            kernel: name of a kernel, to make a `GraphLayout`; empty for a `PackedLayout`.
            multiple: pad the number of tokens to a multiple of this, with one more sequence.
            in_rows: make one padded row for each sequence, for a model that computes rows.
        """
        if in_rows:
            packed = PackedLayout.from_lengths(lengths, device, one_bucket=True)
            return cls(packed.position_ids, packed, in_rows=True)
        if missing := -int(sum(lengths)) % multiple:
            lengths = [*map(int, lengths), missing]
        if not kernel:
            packed = PackedLayout.from_lengths(lengths, device)
            return cls(packed.position_ids, packed)
        sizes = torch.as_tensor(lengths, dtype=torch.int64)
        ends = sizes.cumsum(0)
        position_ids = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - sizes, sizes)
        host_bounds = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        return cls(to_device(position_ids, device), GraphLayout(to_device(host_bounds, device), host_bounds, kernel))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, including the padding sequence."""
        if isinstance(self.packed, PackedLayout):
            return list(self.packed.lengths)
        lengths: list[int] = self.packed.host_bounds.diff().tolist()
        return lengths

    @property
    def buckets(self) -> PackedLayout:
        """Layout of the sequences as padded rows, for code that computes rows."""
        if isinstance(self.packed, PackedLayout):
            return self.packed
        return _layout(tuple(self.packed.host_bounds.tolist()), self.position_ids.device)

    def for_layers(self, *, with_boundaries: bool = True) -> dict[str, Any]:
        """Return the keyword arguments that a model passes to its layers.

        Args:
            with_boundaries: True to include transformers' `BOUNDARIES`: bounds [B + 1], and the index of each token's
                sequence [1, T], int32.
        """
        named: dict[str, Any] = {"packed_layout": self.packed}
        if with_boundaries:
            numbers = ((self.position_ids == 0).cumsum(0) - 1).to(torch.int32).unsqueeze(0)
            named |= zip(BOUNDARIES, (self.packed.bounds, self.packed.bounds, numbers), strict=True)
        return named

    def computed(self, values: torch.Tensor, filling: int) -> torch.Tensor:
        """Return values for the tokens that the model computes: [T, ...], or [P, ...] with padding in rows.

        Args:
            values: [T, ...], one for each packed token.
            filling: value at padding.
        """
        if not self.in_rows:
            return values
        rows = self.buckets
        padded = values.index_select(0, rows.padded_from_packed)
        return padded if rows.padding is None else padded.index_fill(0, rows.padding, filling)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. A copy to a GPU is asynchronous."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def packed_attention_of_a_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    packed_layout: PackedLayout | GraphLayout | None = None,
    packed_context: tuple[int, str] | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention; the model calls this function through transformers' interface.

    Dropout is not applied: log-probabilities must be those of the policy that sampled.

    Args:
        module: the attention module.
        query: [1, heads, T, head size].
        key: [1, key heads, T, head size].
        value: [1, key heads, T, value size].
        attention_mask: must be None.
        scaling: factor of the scores; None for 1 / sqrt(head size).
        sliding_window: number of tokens that a token attends to; None for all.
        s_aux: [heads], attention sinks; None without sinks.
        packed_layout: the batch's layout.
        packed_context: size and name of the context-parallel group; None without context parallelism.
        extras: other arguments of transformers' interface.

    Returns:
        [1, T, heads, value size], and None for the attention weights.

    Raises:
        RunError: the model asks for something that packed attention does not compute.
    """
    _refuse_what_is_not_computed(module, packed_layout, attention_mask, extras)
    assert packed_layout is not None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if packed_context is not None:
        if s_aux is not None:
            raise RunError(
                f"{type(module).__name__} has attention sinks, which context parallelism does not support",
                hints=["set train_engine.parallel.context to 1"],
            )
        q, k, v = tokens_to_heads(q, k, v, *packed_context)
    if isinstance(packed_layout, PackedLayout):
        attended = packed_attention(q, k, v, packed_layout, scale=scaling, window=sliding_window, sinks=s_aux)
    else:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        sinks = q.new_empty(0) if s_aux is None else s_aux
        size = v.shape[-1]
        q, k, v = _pad_heads(q, k, v)
        attended, _ = torch.ops.areal_attention.attention(q, k, v, sinks, *packed_layout, scale, sliding_window or 0)
        attended = attended[..., :size]
    if packed_context is not None:
        attended = heads_to_tokens(attended, *packed_context)
    return attended.unsqueeze(0), None


def kernel_head_size(*sizes: int) -> int:
    """Return the head size with which kernels compute heads of these sizes: the largest, rounded up to 8."""
    return -(-max(sizes) // 8) * 8


def _pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad heads to one size with zeros, which change no score. In latent attention, values are smaller than keys."""
    size = kernel_head_size(*(tensor.shape[-1] for tensor in tensors))
    return [F.pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] < size else heads for heads in tensors]


def _refuse_what_is_not_computed(
    module: torch.nn.Module,
    layout: PackedLayout | GraphLayout | None,
    mask: torch.Tensor | None,
    extras: Mapping[str, Any],
) -> None:
    """Raise RunError if the model's attention asks for something that packed attention does not compute."""
    kind = type(module).__name__
    if layout is None:
        raise RunError(
            f"{kind} does not hand the batch's layout on to attention, so sequences cannot be packed",
            hints=["the engine needs a model whose layers pass keyword arguments down to transformers' interface"],
        )
    if mask is not None:  # transformers makes no mask for PACKED; the layer made it, as a sparse indexer does
        raise RunError(f"{kind} gives its attention a mask of its own, which packed attention does not compute")
    asked = [name for name in _NOT_COMPUTED if extras.get(name) is not None]
    if asked:
        raise RunError(f"{kind} asks its attention for {', '.join(asked)}, which packed attention does not compute")
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RunError(f"{kind} is not causal: this engine trains causal language models")


def register_packed_attention() -> None:
    """Register `PACKED` with transformers; safe to call again."""
    AttentionInterface.register(PACKED, packed_attention_of_a_layer)


def _has_kernel(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=4)
def _layout(bounds: tuple[int, ...], device: torch.device) -> PackedLayout:
    """Return the layout of a batch; cached, because all layers of the batch use it."""
    return PackedLayout.from_lengths([end - start for start, end in pairwise(bounds)], device)


def _reach(host_bounds: torch.Tensor, scale: float, window: int) -> Reach:
    longest = int(host_bounds.diff().max())
    return Reach(longest, scale, 0 if window >= longest else window)


@contextmanager
def _autograd_inside_an_operation() -> Iterator[None]:
    """Enable autograd inside a custom operation, which runs below it."""
    core: Any = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(core.DispatchKey.__members__[name])
    with core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


@torch.library.custom_op("areal_attention::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    bounds: torch.Tensor,
    host_bounds: torch.Tensor,
    kernel: str,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal packed attention as one node of a graph; see `GraphLayout`.

    A sink s of a head adds exp(s) to the softmax's denominator exp(l). So the result is that of a kernel without sinks
    times exp(l - l'), with l' = log(exp(l) + exp(s)). The kernel's backward pass is exact with l' instead of l.

    Args:
        query: [T, heads, head size].
        key: [T, key heads, head size].
        value: [T, key heads, head size].
        sinks: [heads]; empty for none.
        bounds: see `GraphLayout`.
        host_bounds: see `GraphLayout`.
        kernel: see `GraphLayout`.
        scale: factor of the scores.
        window: number of tokens that a token attends to, 0 for all.

    Returns:
        [T, heads, head size], and for the backward pass the logarithm of the softmax's denominator, [heads, T] float32;
        without a kernel the latter is unused.
    """
    if _has_kernel(query):
        reach = _reach(host_bounds, scale, window)
        attended, denominator = kernel_for(kernel, reach).forward(query, key, value, bounds, reach)
        if len(sinks):
            whole = torch.logaddexp(denominator, sinks.float()[:, None])
            attended = (attended * (denominator - whole).exp().t()[..., None]).to(attended.dtype)
            denominator = whole
        return attended.contiguous(), denominator.contiguous()
    layout = _layout(tuple(host_bounds.tolist()), query.device)
    settings: Any = {"scale": scale, "window": window or None, "sinks": sinks if len(sinks) else None}
    attended = packed_attention(query, key, value, layout, **settings)
    return attended.contiguous(), query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("areal_attention::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attended: torch.Tensor,
    denominator: torch.Tensor,
    bounds: torch.Tensor,
    host_bounds: torch.Tensor,
    kernel: str,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and sinks, in their shapes. Without a kernel, recompute attention.

    With the output o and its gradient g, the gradient of a sink s is -sum over tokens of exp(s - l') (g . o).
    """
    if _has_kernel(query):
        reach = _reach(host_bounds, scale, window)
        gradients = kernel_for(kernel, reach).backward(
            gradient.contiguous(), query, key, value, attended, denominator, bounds, reach
        )
        of_query, of_key, of_value = (part.contiguous() for part in gradients)
        if not len(sinks):
            return of_query, of_key, of_value, torch.empty_like(sinks)
        weight = (sinks.float()[:, None] - denominator).exp()
        of_sinks = -(weight * (gradient.float() * attended.float()).sum(-1).t()).sum(1)
        return of_query, of_key, of_value, of_sinks.to(sinks.dtype)
    layout = _layout(tuple(host_bounds.tolist()), query.device)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value, sinks)]
    differentiated = leaves if len(sinks) else leaves[:3]
    settings: Any = {"scale": scale, "window": window or None, "sinks": leaves[3] if len(sinks) else None}
    with _autograd_inside_an_operation():
        recomputed = packed_attention(leaves[0], leaves[1], leaves[2], layout, **settings)
        grads = [part.contiguous() for part in torch.autograd.grad(recomputed, differentiated, gradient)]
    return grads[0], grads[1], grads[2], grads[3] if len(sinks) else torch.empty_like(sinks)


@attention.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count, heads, size = query.shape
    return query.new_empty(count, heads, size), query.new_empty(heads, count, dtype=torch.float32)


@attention_backward.register_fake
def _(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, sinks = (tensor.new_empty(tensor.shape) for tensor in inputs[:4])
    return query, key, value, sinks


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.kernel, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, bounds, host_bounds, attended, denominator = ctx.saved_tensors
    gradients = torch.ops.areal_attention.attention_backward(
        gradient, *tensors, attended, denominator, bounds, host_bounds, ctx.kernel, ctx.scale, ctx.window
    )
    return (*gradients, None, None, None, None, None)


attention.register_autograd(_gradients, setup_context=_save_context)
