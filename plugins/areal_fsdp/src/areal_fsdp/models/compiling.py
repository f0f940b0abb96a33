"""Compiling and recomputing a model's layers.

All layers are compiled once, for any number of tokens and sequences: their inputs' sizes are marked as dynamic before
the first call, and what else a batch brings stands in tensors (`GraphLayout`). With gradients and without them there
are two graphs, and both are kept.
"""

from __future__ import annotations

import logging
import shutil
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal_fsdp.parallel.experts import moe_blocks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from transformers import PreTrainedModel

    from areal_fsdp.planning.recomputing import Recomputing

log = logging.getLogger(__name__)

BACKEND = "inductor"
FEWEST_TOKENS = 1024
"""A GPU compiles for no fewer: the compiler tunes its code for the first call's size, and keeps it for all."""
_GRAPHS = 64
"""Graphs that PyTorch may keep for one function. Roles, precisions and kinds of layers share the layers' code."""


def should_compile(wanted: bool | None, device: torch.device) -> bool:
    """What the setting `compile` means here: unless it is said, yes on a GPU that Triton serves, no on a CPU.

    On a CPU the compiler's first minute costs more than it brings for models that a CPU can train.
    """
    if wanted is None:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted and device.type == "cpu" and BACKEND == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        log.warning("train_engine.compile is on, but there is no C++ compiler: nothing is compiled")
        return False
    return wanted


def choose_products(model: PreTrainedModel, dtype: torch.dtype, *, compile_them: bool) -> None:
    """Experts of MoE models are computed by grouped matrix products, which a compiler takes in bfloat16 alone."""
    if compile_them and dtype != torch.bfloat16 and next(moe_blocks(model), None) is not None:
        log.warning(
            "a compiler knows no grouped matrix products in %s: each token's experts are copied for it. Set "
            "train_engine.compile to false, or model.dtype to bfloat16",
            str(dtype).removeprefix("torch."),
        )
        model.set_experts_implementation("batched_mm")


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """`function` as one graph, compiled when it is first called; `dynamic` as in `torch.compile`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    result: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=BACKEND)
    return result


def mark_dynamic(tensor: Any, dimension: int) -> None:
    """Let graphs take any size along `dimension`, where `tensor` is one."""
    if isinstance(tensor, torch.Tensor):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def prepare_layers(
    model: PreTrainedModel, *, compile_them: bool, recomputing: Recomputing, eager: Container[int] = ()
) -> None:
    """Compile the decoder layers, or have some of their activations computed again in the backward pass, or both.

    A layer's `forward` is replaced, not the layer: names stay, and sharding's hooks run around it. Layers that are
    computed again whole keep their input alone, and compiled ones the result of attention too: it is as small as the
    input, and the dearest to compute again for its size.

    Args:
        model: whose layers these are.
        compile_them: whether to compile.
        recomputing: which layers compute what again.
        eager: the numbers of layers that are not compiled in any case, because they are no one graph.
    """
    modes: set[bool] = set()
    layers = decoder_layers(model)
    for number, (layer, amount) in enumerate(zip(layers, recomputing.of_layers(len(layers)), strict=True)):
        forward: Callable[..., Any] = layer.forward
        is_compiled = compile_them and number not in eager
        if amount == "elementwise":
            forward = _recomputed(forward, {"context_fn": _elementwise_again})
        elif amount == "whole":
            forward = _recomputed(forward, {"context_fn": _all_but_attention_again} if is_compiled else {})
        layer.forward = _compiled_for_any_size(forward, modes) if is_compiled else forward


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def call(hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(forward, hidden, *others, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return call


def _compiled_for_any_size(forward: Callable[..., Any], modes: set[bool]) -> Callable[..., Any]:
    """Mark what varies in a layer's inputs: hidden states and position embeddings [1, T, ...], bounds [B + 1].

    Args:
        forward: of the layer.
        modes: whether gradients were on, of all calls that were compiled for; shared by the layers.
    """
    graph = compiled(forward)

    @wraps(forward)
    def call(hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        tokens, mode = hidden.shape[1], torch.is_grad_enabled()
        if hidden.is_cuda and (tokens < 2 or (tokens < FEWEST_TOKENS and mode not in modes)):
            return forward(hidden, *others, **named)
        modes.add(mode)
        mark_dynamic(hidden, 1)
        for value in (*others, *named.values()):
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, torch.Tensor):
                    mark_dynamic(part, 1 if part.dim() > 1 else 0)
        return graph(hidden, *others, **named)

    return call


_CHECKED = "Detected that context_fn is passed"  # a warning of in-place operations: models' layers have none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: _CHECKED not in str(record.msg))


def _elementwise_again() -> Any:
    return _all_again_but([*_PRODUCTS, *_ATTENTION])


def _all_but_attention_again() -> Any:
    return _all_again_but([])


def _all_again_but(operations: list[Any]) -> Any:
    operations = [*operations, torch.ops.areal_attention.attention.default]
    return create_selective_checkpoint_contexts(operations)  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default]
_ATTENTION = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
