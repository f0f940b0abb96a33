"""Expert parallelism: each rank has some experts of every MoE layer; tokens go to their experts' ranks and come back.

The router and the rest of a layer see only a rank's own tokens. Each (token, expert) pair is one row of an all-to-all
without a capacity, so none is dropped (GShard, arXiv 2006.16668, section 3.2). Rows are weighted on the token's rank.
Grouped matrix products compute a rank's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from areal_core.errors import RunError
from areal_fsdp.parallel.collectives import exchanged, group_name, moved
from areal_fsdp.parallel.tensor import keep_part, own_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

DIVIDED = "areal_divided"
"""Name under which `_divided` is registered with transformers."""


def moe_blocks(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules that hold all experts of a layer, in parameters [experts, ...]."""
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "num_experts"):  # of `use_experts_implementation`
            yield module


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts of each layer, and make the model exchange tokens.

    Raises:
        RunError: the model does not use transformers' interface for implementations of experts.
    """
    if not (blocks := list(moe_blocks(model))):
        raise RunError(
            f"model type {model.config.model_type} computes its experts in a way of its own, which this engine does "
            "not divide",
            hints=["set train_engine.parallel.expert to 1; more ranks work for every model"],
        )
    for module in blocks:
        for name, _ in list(module.named_parameters(recurse=False)):
            keep_part(module, name, 0, mesh)
        module.num_experts //= mesh.size()
        module.group, module.ranks = group_name(mesh), mesh.size()
    ALL_EXPERTS_FUNCTIONS.register(DIVIDED, _divided)
    model.set_experts_implementation(DIVIDED)


class _OwnExperts:
    """A view of a module of experts whose parameters are this rank's part, for transformers' functions."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return own_part(value) if isinstance(value, torch.Tensor) else value


def _divided(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the experts of a layer that are spread over ranks; collective.

    Args:
        module: the module of the experts.
        hidden: [T, H], this rank's tokens.
        chosen: [T, K] int64, the tokens' experts, numbered over all ranks.
        weights: [T, K], weights of the experts.

    Returns:
        [T, H], in the dtype of `hidden`.
    """
    tokens, choices = chosen.shape
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    sent = torch.bincount(pairs, minlength=module.ranks * module.num_experts).view(module.ranks, -1)
    received = exchanged(sent, module.group)
    rows_sent, rows_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # synchronizes with the device
    rows = moved(hidden[order // choices], rows_received, rows_sent, module.group)
    numbers = torch.arange(module.num_experts, device=rows.device).repeat(module.ranks)
    experts = numbers.repeat_interleave(received.flatten(), output_size=len(rows))
    computed = _computed(module, rows, experts)
    returned = moved(computed, rows_sent, rows_received, module.group)
    outputs = torch.zeros_like(returned).index_copy(0, order, returned).view(tokens, choices, -1)
    return (outputs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _computed(module: torch.nn.Module, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the outputs [R, H] of rows [R, H] in this rank's experts [R]."""
    count = len(rows)
    if not count:  # a padding row makes gradients of 0, which the collectives of sharding need
        rows, experts = F.pad(rows, (0, 0, 0, 1)), F.pad(experts, (0, 1))
    ones = torch.ones_like(experts, dtype=rows.dtype).unsqueeze(-1)
    own: Any = _OwnExperts(module)
    result: torch.Tensor = grouped_mm_experts_forward(own, rows, experts.unsqueeze(-1), ones)
    return result[:count]
