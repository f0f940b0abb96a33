"""Context parallelism: ranks have equal shares of a packed batch's tokens, and in attention all tokens of some heads.

Everything but attention treats tokens one by one. Before it ranks exchange: each gives away its tokens of the heads
that it does not keep, and gets the other tokens of those that it keeps; behind it the results go back (DeepSpeed
Ulysses, arXiv 2309.14509). Attention itself sees whole sequences, by any kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from areal_fsdp.parallel.collectives import exchanged, group_name, joined

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Context:
    """This rank's share of each micro-batch.

    Args:
        mesh: of the ranks that have the sequences together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.group = group_name(mesh)
        self.size = mesh.size()

    def own(self, tokens: torch.Tensor, total: int) -> torch.Tensor:
        """This rank's part of [T, ...], filled up with 0 to `total` tokens."""
        filled = F.pad(tokens, (*(0, 0) * (tokens.dim() - 1), 0, total - len(tokens)))
        return filled.chunk(self.size)[self._mesh.get_local_rank()]

    def whole(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` tokens of all parts [T / size, ...], on every rank."""
        return joined(values, self._mesh)[:count].clone()  # sharding hooks into it, and must not find a view


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T / size, heads, head size] of some tokens to [T, heads / size, head size] of some heads.

    Key heads of which there are fewer than ranks go to several.
    """
    if key.shape[1] < size:
        key, value = (part.repeat_interleave(size // part.shape[1], 1) for part in (key, value))
    parts = [part.view(len(part), size, -1, part.shape[2]) for part in (query, key, value)]
    found = exchanged(torch.cat(parts, 2).transpose(0, 1), group).flatten(0, 1)
    heads, key_heads = parts[0].shape[2], parts[1].shape[2]
    return found[:, :heads], found[:, heads : heads + key_heads], found[:, heads + key_heads :]


def heads_to_tokens(attended: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[T, heads / size, head size] of some heads to [T / size, heads, head size] of some tokens."""
    _, heads, head_size = attended.shape
    return exchanged(attended.view(size, -1, heads, head_size), group).transpose(0, 1).flatten(1, 2)
