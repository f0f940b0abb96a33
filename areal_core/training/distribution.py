"""One batch for all ranks of the trainer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from areal_core.data.batch import PackedBatch
from areal_core.interfaces.source import Interrupted

STOP, EMPTY = -1, 0


def distribute(result: tuple[PackedBatch | None, dict[str, float]] | None) -> PackedBatch | None:
    """Give rank 0's batch to all ranks, as bytes.

    Args:
        result: of `next_batch` on rank 0, None where the run shall stop; ignored on other ranks.

    Returns:
        The batch, or None for a batch without data.

    Raises:
        Interrupted: on every rank, where rank 0 has been asked to stop.
    """
    if dist.get_world_size() == 1:
        if result is None:
            raise Interrupted
        return result[0]
    data = b"" if result is None or result[0] is None else result[0].to_bytes()
    size = torch.tensor([STOP if result is None else len(data)])
    dist.broadcast(size, 0)
    if int(size) == STOP:
        raise Interrupted
    if int(size) == EMPTY:
        return None
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return PackedBatch.from_bytes(buffer.numpy().tobytes())
