"""Weights in the memory of the trainer's GPUs (CUDA IPC), as SGLang takes them: a pickle."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.engines import SharedMemory, TensorDescription


class _Tensor:
    """Pickled as what PyTorch makes of a tensor of a GPU for another process: a call that opens its memory there."""

    def __init__(self, tensor: TensorDescription, memory: SharedMemory) -> None:
        self._tensor = tensor
        self._memory = memory

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        told, memory = self._tensor, self._memory
        shape = torch.Size(told.shape)
        layout = (torch.Tensor, shape, torch.empty(shape, device="meta").stride(), memory.start)
        # By its UUID: SGLang knows the GPU under a number of its own.
        kind = (torch.UntypedStorage, getattr(torch, told.dtype), memory.device)
        place = (bytes.fromhex(memory.handle), memory.size, memory.offset, False)
        counter = (bytes.fromhex(memory.counter), memory.counter_offset)
        return rebuild_cuda_tensor, (*layout, *kind, *place, *counter, b"", False)  # no event to wait for


def pickled(tensors: Sequence[TensorDescription], memories: Sequence[SharedMemory]) -> bytes:
    """Return names of tensors with where each is on one GPU. areal itself reads no pickle."""
    named = [(tensor.name, _Tensor(tensor, memory)) for tensor, memory in zip(tensors, memories, strict=True)]
    return pickle.dumps(named, protocol=4)
