"""Compile a model's layers, and recompute activations in the backward pass.

All layers share one compiled graph for any number of tokens and sequences: sizes of inputs are marked as dynamic before
the first call, and the bounds of sequences are tensors (`GraphLayout`). There are two graphs, with and without
gradients.
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
"""Fewest tokens of a call that triggers compilation on a GPU: code is tuned for the size of the first call."""
_GRAPHS = 64
"""Largest number of graphs for one function. Roles, dtypes and types of layers share the layers' code."""


def should_compile(wanted: bool | None, device: torch.device) -> bool:
    """Return `wanted`; if None, True on CUDA of capability 8.0 or higher, else False.

    The default on a CPU is False: compiling takes about a minute, more than it saves for models that a CPU can train.
    On a CPU without a C++ compiler the result is False, with a warning, even if `wanted` is True.
    """
    if wanted is None:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted and device.type == "cpu" and BACKEND == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        log.warning("train_engine.compile is on, but there is no C++ compiler: nothing is compiled")
        return False
    return wanted


def choose_products(model: PreTrainedModel, dtype: torch.dtype, *, compile_them: bool) -> None:
    """Choose how a compiled MoE computes its experts: grouped matrix products compile only in bfloat16."""
    if not compile_them:
        return
    for block in eager_experts(model):
        block.forward = torch.compiler.disable(block.forward)  # type: ignore[no-untyped-call]
    if dtype != torch.bfloat16 and any(not block.is_transposed for block in moe_blocks(model)):
        log.warning(
            "grouped matrix products cannot be compiled in %s: each token's experts are copied instead, which is slow. "
            "Set train_engine.compile to false, or model.dtype to bfloat16",
            str(dtype).removeprefix("torch."),
        )
        model.set_experts_implementation("batched_mm")


def eager_experts(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the modules of experts that are not compiled.

    These are experts that a model computes in its own loop over the chosen experts (LongCat-Flash), and experts with
    weights [experts, inputs, outputs] (gpt-oss). For the latter, PyTorch 2.14 chooses a memory order of the gradients'
    operands that grouped products refuse: "expected input tensor dynamic dimension byte size to be non-negative
    multiple of 16".
    """
    grouped = set(moe_blocks(model))
    for module in model.modules():
        has_loop = module not in grouped and "top_k_index" in signature(type(module).forward).parameters
        if has_loop or (module in grouped and module.is_transposed):
            yield module


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = None, one_graph: bool = True
) -> Callable[..., Any]:
    """Return a compiled version of `function`; it is compiled at its first call.

    Args:
        function: the function.
        dynamic: see `torch.compile`.
        one_graph: False to allow graph breaks.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    result: Callable[..., Any] = torch.compile(function, fullgraph=one_graph, dynamic=dynamic, backend=BACKEND)
    return result


def mark_dynamic(tensor: Any, dimension: int) -> None:
    """Mark a dimension as dynamic if `tensor` is a tensor, so that graphs accept any size."""
    if isinstance(tensor, torch.Tensor):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def prepare_layers(
    model: PreTrainedModel, *, compile_them: bool, recomputing: Recomputing, in_parts: Container[int] = ()
) -> None:
    """Compile the decoder layers, recompute some of their activations in the backward pass, or both.

    This replaces each layer's `forward`, so that names stay and FSDP's hooks run outside of it. A layer that recomputes
    everything keeps only its input; a compiled one also keeps the result of attention, which is as small as the input
    and the most expensive tensor to recompute for its size.

    A layer with a mixer is several graphs, because the mixer's kernels cannot be compiled. The compiler recomputes
    elementwise operations in each graph anyway, and `whole` recomputes all of the layer's graphs.

    Args:
        model: the model.
        compile_them: True to compile the layers.
        recomputing: numbers of layers that recompute activations.
        in_parts: indices of the layers that are several graphs; see `RoleModule.layers_in_parts`.
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
            forward = _recomputed(forward, {"context_fn": _recompute_elementwise})
        elif amount == "whole":
            forward = _recomputed(forward, {"context_fn": _recompute_except_attention} if compile_them else {})
        layer.forward = _compiled_for_any_size(forward, modes) if compile_them else forward


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def call(hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(forward, hidden, *others, use_reentrant=False, preserve_rng_state=False, **options, **named)

    return call


def _compiled_for_any_size(
    forward: Callable[..., Any], modes: set[bool], *, one_graph: bool = True
) -> Callable[..., Any]:
    """Compile a layer with dynamic sizes: hidden states and position embeddings [1, T, ...], bounds [B + 1].

    Args:
        forward: the layer's forward.
        modes: gradient modes (enabled or disabled) that are compiled already; all layers share this set.
        one_graph: False for a layer of several graphs. Then all sizes are dynamic, because the inputs of later graphs
            cannot be marked.
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


_CHECKED = "Detected that context_fn is passed"  # warns about in-place operations, which models' layers do not have
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: _CHECKED not in str(record.msg))


def _recompute_elementwise() -> Any:
    return _keep_results_of([*_PRODUCTS, *_ATTENTION])


def _recompute_except_attention() -> Any:
    return _keep_results_of([])


def _keep_results_of(operations: list[Any]) -> Any:
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
