"""The device mesh of an engine: process groups of data, context, tensor and expert parallelism.

The mesh's dimensions are, from the outermost, replicas, data, context and tensor, so that the ranks that communicate
most are neighbors on one node. Ranks along `context` and `tensor` work on the same sequences: they get the same part of
a batch.
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
    """This rank's position and process groups.

    Attributes:
        share: index of this rank's part of a batch.
        shares: number of parts of a batch.
        leads: True for the first of the ranks that work on the same sequences; it reports their results.
        shards: mesh over which parameters are sharded, [shards], or [replicas, shards] for hybrid sharding; None for a
            single rank.
        context: context-parallel group, None without context parallelism.
        tensor: tensor-parallel group, None without tensor parallelism.
        experts: the ranks of `shards` as [expert_shards, experts], or [replicas, expert_shards, experts]; None without
            expert parallelism.
    """

    share: int = 0
    shares: int = 1
    leads: bool = True
    shards: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None


def place_ranks(settings: ParallelSettings, device: torch.device) -> Ranks:
    """Create the process groups; collective. `ParallelSettings.problem` must accept the number of ranks."""
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
