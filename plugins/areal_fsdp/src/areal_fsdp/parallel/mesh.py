"""How the ranks of an engine stand: who shares a batch, who shares a sequence, who shares a layer.

Rank numbers run over replicas, then data, then context, then tensor, so that ranks that talk most are neighbors, on
one node. Ranks along `context` and `tensor` work on the same sequences: for a batch they count as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from areal_fsdp.parallel.settings import ParallelSettings


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place among all.

    Attributes:
        share: which part of a batch is this rank's.
        shares: how many parts there are.
        leads: whether this rank speaks for those that work on the same sequences.
        shards: the ranks that parameters are sharded over, [replicas, shards] where there are replicas; None for a
            single rank.
        context: those that have one sequence together, None where there is one.
        tensor: those that have one layer together, None where there is one.
        experts: the ranks of `shards` in groups that have all experts together, [replicas, expert_shards, experts], or
            without replicas; None where each has all of them.
    """

    share: int = 0
    shares: int = 1
    leads: bool = True
    shards: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None


def place_ranks(settings: ParallelSettings, device: torch.device) -> Ranks:
    """Form the groups, for a number of ranks that the settings allow; collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context, tensor = settings.context, settings.tensor
    data = ranks // (context * tensor)
    outer = (settings.replicas,) if settings.replicas > 1 else ()
    names = ("replicas", "shards", "tensor")[1 - len(outer) : 2 + (tensor > 1)]
    sizes = (*outer, data // settings.replicas * context, *((tensor,) if tensor > 1 else ()))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    by_context = None
    if context > 1:
        by_context = init_device_mesh(
            device.type, (data, context, tensor), mesh_dim_names=("data", "context", "tensor")
        )["context"]
    by_expert = None
    if (expert := settings.expert) > 1:
        within = (data // settings.replicas * context // expert, expert)
        kinds = ("replicas", "expert_shards", "experts")[1 - len(outer) :]
        by_expert = init_device_mesh(device.type, (*outer, *within), mesh_dim_names=kinds)
    return Ranks(
        share=rank // (context * tensor),
        shares=data,
        leads=rank % (context * tensor) == 0,
        shards=mesh[names[:-1]] if tensor > 1 else mesh,
        context=by_context,
        tensor=mesh["tensor"] if tensor > 1 else None,
        experts=by_expert,
    )
