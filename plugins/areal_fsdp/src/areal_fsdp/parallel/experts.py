"""Expert parallelism: each rank has some experts of every MoE; tokens go to their experts' ranks and come back.

The router and everything else of a layer sees a rank's own tokens alone. Each choice of a token travels by itself, in
an exchange of as many rows as there are, so none is ever dropped (GShard, arXiv 2006.16668, section 3.2, without its
capacity); it is weighted where its token is. Grouped matrix products compute a rank's experts.
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
"""What transformers knows the function below by."""


def moe_blocks(model: torch.nn.Module) -> Iterator[Any]:
    """The modules that hold the experts of a layer, all in one: parameters [experts, ...]."""
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "num_experts"):  # of `use_experts_implementation`
            yield module


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of each MoE, and send tokens around from now on.

    Raises:
        RunError: there are no MoE models of the kind that transformers lets others compute.
    """
    if not (found := list(moe_blocks(model))):
        raise RunError(
            f"model type {model.config.model_type} computes its experts in a way of its own, which this engine does "
            "not divide",
            hints=["set train_engine.parallel.expert to 1; more ranks work for every model"],
        )
    for module in found:
        for name, _ in list(module.named_parameters(recurse=False)):
            keep_part(module, name, 0, mesh)
        module.num_experts //= mesh.size()
        module.group, module.ranks = group_name(mesh), mesh.size()
    ALL_EXPERTS_FUNCTIONS.register(DIVIDED, _divided)
    model.set_experts_implementation(DIVIDED)


class _OwnExperts:
    """What a function of experts reads of their module, with this rank's part of its parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return own_part(value) if isinstance(value, torch.Tensor) else value


def _divided(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute an MoE of which each rank has some experts; collective.

    Args:
        module: of the experts.
        hidden: [T, H], of this rank's tokens.
        chosen: [T, K] int64, their experts among those of all ranks.
        weights: [T, K], of these.

    Returns:
        [T, H].
    """
    tokens, choices = chosen.shape
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    sent = torch.bincount(pairs, minlength=module.ranks * module.num_experts).view(module.ranks, -1)
    received = exchanged(sent, module.group)
    given, taken = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the device is waited for
    rows = moved(hidden[order // choices], taken, given, module.group)
    numbers = torch.arange(module.num_experts, device=rows.device).repeat(module.ranks)
    experts = numbers.repeat_interleave(received.flatten(), output_size=len(rows))
    computed = _computed(module, rows, experts)
    back = moved(computed, given, taken, module.group)
    found = torch.zeros_like(back).index_copy(0, order, back).view(tokens, choices, -1)
    return (found * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _computed(module: torch.nn.Module, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[R, H] of rows [R, H] through their experts [R] of this rank; where none came, gradients are 0, not absent."""
    count = len(rows)
    if not count:
        rows, experts = F.pad(rows, (0, 0, 0, 1)), F.pad(experts, (0, 1))
    ones = torch.ones_like(experts, dtype=rows.dtype).unsqueeze(-1)
    own: Any = _OwnExperts(module)
    result: torch.Tensor = grouped_mm_experts_forward(own, rows, experts.unsqueeze(-1), ones)
    return result[:count]
