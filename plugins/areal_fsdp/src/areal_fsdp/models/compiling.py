"""Compiling and recomputing a model's layers.

All layers are compiled once, for any number of tokens and sequences: their inputs' sizes are marked as dynamic before
the first call, and what else a batch brings stands in tensors (`GraphLayout`). With gradients and without them there
are two graphs, and both are kept.
"""

from __future__ import annotations

import logging
import shutil
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal_fsdp.parallel.experts import moe_blocks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from transformers import PreTrainedModel

    from areal_fsdp.planning.recomputing import Recomputing

log = logging.getLogger(__name__)

BACKEND = "inductor"
FEWEST_TOKENS = 1024
"""A GPU compiles for no fewer: the compiler tunes its code for the first call's size, and keeps it for all."""
_GRAPHS = 64
"""Graphs that PyTorch may keep for one function. Roles, precisions and kinds of layers share the layers' code."""


def should_compile(wanted: bool | None, device: torch.device) -> bool:
    """Return `wanted`; if None, True on CUDA of capability 8.0 or higher, else False.

    The default on a CPU is False: compiling takes about a minute, which models that a CPU can train do not win back. On
    a CPU without a C++ compiler the result is False, with a warning, even if `wanted` is True.
    """
    if wanted is None:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted and device.type == "cpu" and BACKEND == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        log.warning("train_engine.compile is on, but there is no C++ compiler: nothing is compiled")
        return False
    return wanted


def choose_products(model: PreTrainedModel, dtype: torch.dtype, *, compile_them: bool) -> None:
    """Experts of MoE models are computed by grouped matrix products, which a compiler takes in bfloat16 alone."""
    if not compile_them:
        return
    for block in eager_experts(model):
        block.forward = torch.compiler.disable(block.forward)  # type: ignore[no-untyped-call]
    if dtype != torch.bfloat16 and any(not block.is_transposed for block in moe_blocks(model)):
        log.warning(
            "a compiler knows no grouped matrix products in %s: each token's experts are copied for it. Set "
            "train_engine.compile to false, or model.dtype to bfloat16",
            str(dtype).removeprefix("torch."),
        )
        model.set_experts_implementation("batched_mm")


def eager_experts(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the modules of experts that a compiler goes around.

    These are experts that a model computes in a loop of its own over those that tokens chose (LongCat-Flash), and
    experts with weights [experts, inputs, outputs] (gpt-oss). PyTorch 2.14 lays the operands of the latter's gradients
    out in an order that grouped products do not take: "expected input tensor dynamic dimension byte size to be
    non-negative multiple of 16".
    """
    grouped = set(moe_blocks(model))
    for module in model.modules():
        has_loop = module not in grouped and "top_k_index" in signature(type(module).forward).parameters
        if has_loop or (module in grouped and module.is_transposed):
            yield module


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = None, one_graph: bool = True
) -> Callable[..., Any]:
    """`function`, compiled when it is first called; `dynamic` as in `torch.compile`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    result: Callable[..., Any] = torch.compile(function, fullgraph=one_graph, dynamic=dynamic, backend=BACKEND)
    return result


def mark_dynamic(tensor: Any, dimension: int) -> None:
    """Let graphs take any size along `dimension`, where `tensor` is one."""
    if isinstance(tensor, torch.Tensor):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def prepare_layers(
    model: PreTrainedModel, *, compile_them: bool, recomputing: Recomputing, in_parts: Container[int] = ()
) -> None:
    """Compile the decoder layers, or have some of their activations computed again in the backward pass, or both.

    A layer's `forward` is replaced, not the layer: names stay, and sharding's hooks run around it. Layers that are
    computed again whole keep their input alone, and compiled ones the result of attention too: it is as small as the
    input, and the dearest to compute again for its size.

    A layer with a mixer is several graphs, with the mixer's kernels between them, which no compiler sees into. What is
    `elementwise` such graphs compute again in any case, and the layer is computed again whole around all of them.

    Args:
        model: whose layers these are.
        compile_them: whether to compile.
        recomputing: which layers compute what again.
        in_parts: the numbers of the layers that are several graphs; see `RoleModule.layers_in_parts`.
    """
    modes: set[bool] = set()
    layers = decoder_layers(model)
    for number, (layer, amount) in enumerate(zip(layers, recomputing.of_layers(len(layers)), strict=True)):
        forward: Callable[..., Any] = layer.forward
        if compile_them and number in in_parts:
            forward = _compiled_for_any_size(forward, modes, one_graph=False)
            layer.forward = _recomputed(forward, {}) if amount == "whole" else forward
            continue
        if amount == "elementwise":
            forward = _recomputed(forward, {"context_fn": _elementwise_again})
        elif amount == "whole":
            forward = _recomputed(forward, {"context_fn": _all_but_attention_again} if compile_them else {})
        layer.forward = _compiled_for_any_size(forward, modes) if compile_them else forward


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def call(hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(forward, hidden, *others, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return call


def _compiled_for_any_size(
    forward: Callable[..., Any], modes: set[bool], *, one_graph: bool = True
) -> Callable[..., Any]:
    """Mark what varies in a layer's inputs: hidden states and position embeddings [1, T, ...], bounds [B + 1].

    Args:
        forward: of the layer.
        modes: whether gradients were on, of all calls that were compiled for; shared by the layers.
        one_graph: whether the layer is one; of several, the later ones get sizes that nobody has marked.
    """
    graph = compiled(forward, one_graph=one_graph, dynamic=None if one_graph else True)

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
