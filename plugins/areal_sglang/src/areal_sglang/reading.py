"""Locations of weights in the memory of the trainer's GPUs (CUDA IPC), in SGLang's form: a pickle."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.engines import SharedMemory, TensorDescription


class _Tensor:
    """Pickles as PyTorch's reduction of a CUDA tensor: a call that opens the memory in the other process."""

    def __init__(self, tensor: TensorDescription, memory: SharedMemory) -> None:
        self._tensor = tensor
        self._memory = memory

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        tensor, memory = self._tensor, self._memory
        shape = torch.Size(tensor.shape)
        layout = (torch.Tensor, shape, torch.empty(shape, device="meta").stride(), memory.start)
        # The device is a UUID: SGLang may number the GPUs differently.
        storage = (torch.UntypedStorage, getattr(torch, tensor.dtype), memory.device)
        location = (bytes.fromhex(memory.handle), memory.size, memory.offset, False)
        counter = (bytes.fromhex(memory.counter), memory.counter_offset)
        return rebuild_cuda_tensor, (*layout, *storage, *location, *counter, b"", False)  # no event to wait for


def pickled(tensors: Sequence[TensorDescription], memories: Sequence[SharedMemory]) -> bytes:
    """Return pickled pairs of a tensor's name and its location on one GPU. areal itself never unpickles."""
    named = [(tensor.name, _Tensor(tensor, memory)) for tensor, memory in zip(tensors, memories, strict=True)]
    return pickle.dumps(named, protocol=4)
