"""Context parallelism: ranks have equal shares of a packed batch's tokens, and in attention all tokens of some heads.

All modules except attention process tokens independently. Before attention, an all-to-all gives each rank all tokens of
its heads; a second one after attention returns the results (DeepSpeed Ulysses, arXiv 2309.14509). So attention sees
whole sequences, and any kernel works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from areal_fsdp.parallel.collectives import exchanged, group_name, joined

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Context:
    """This rank's share of the tokens of each micro-batch.

    Args:
        mesh: the context-parallel group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.group = group_name(mesh)
        self.size = mesh.size()

    def own(self, tokens: torch.Tensor, total: int) -> torch.Tensor:
        """Return this rank's part of [T, ...], after padding with 0 to `total` tokens: [total / size, ...]."""
        padded = F.pad(tokens, (*(0, 0) * (tokens.dim() - 1), 0, total - len(tokens)))
        return padded.chunk(self.size)[self._mesh.get_local_rank()]

    def whole(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` tokens of all parts [T / size, ...], on every rank."""
        return joined(values, self._mesh)[:count].clone()  # FSDP puts hooks on the output, which must not be a view


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange [T / size, heads, head size] of some tokens for [T, heads / size, head size] of some heads.

    If there are fewer key heads than ranks, several ranks get the same key head.
    """
    if key.shape[1] < size:
        key, value = (part.repeat_interleave(size // part.shape[1], 1) for part in (key, value))
    parts = [part.view(len(part), size, -1, part.shape[2]) for part in (query, key, value)]
    received = exchanged(torch.cat(parts, 2).transpose(0, 1), group).flatten(0, 1)
    heads, key_heads = parts[0].shape[2], parts[1].shape[2]
    return received[:, :heads], received[:, heads : heads + key_heads], received[:, heads + key_heads :]


def heads_to_tokens(attended: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Exchange [T, heads / size, head size] of some heads for [T / size, heads, head size] of some tokens."""
    _, heads, head_size = attended.shape
    return exchanged(attended.view(size, -1, heads, head_size), group).transpose(0, 1).flatten(1, 2)
