"""Weights that servers read in the memory of the trainer's GPUs, on which they stand themselves (CUDA IPC)."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.errors import RunError
from areal_servers.errors import FAULTS, UpdateRefusedError, in_time, known_form
from areal_servers.interface import WeightGroup
from areal_servers.roster import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.interfaces import SharedMemory, SharedTensor, TensorDescription
    from areal_servers.roster import Member, Roster
    from areal_sglang.adapter import SGLangAdapter
    from areal_sglang.config import SGLangConfig


class Reading:
    """Has the servers that gave their memory to the trainer read its weights, part by part.

    Who has read every part is in a group of backend `ipc` when the weights are published, and who is in none waits for
    a folder, as after a broadcast.

    Args:
        settings: of the fleet.
        adapter: speaks to the servers.
        roster: the servers.
        gpus: of all servers that the run starts, divided among them in order.
    """

    def __init__(self, settings: SGLangConfig, adapter: SGLangAdapter, roster: Roster, gpus: Sequence[int]) -> None:
        self._settings = settings
        self._adapter = adapter
        self._roster = roster
        self._gpus = gpus
        self._version = -1
        self._readers: list[Member] = []

    async def read(self, version: int, tensors: Sequence[SharedTensor]) -> None:
        """See `TensorReader.read_tensors`: a server that fails is taken out and catches up later."""
        if version != self._version:
            self._version = version
            self._readers = [one for one in self._roster.those(State.UPDATING) if not one.has_memory]
        are_read = await asyncio.gather(*(self._read(member, version, tensors) for member in self._readers))
        self._readers = [member for member, is_read in zip(self._readers, are_read, strict=True) if is_read]
        if not self._readers:
            raise RunError(f"no server has read the weights of version {version}; {self._roster.explain()}")

    async def _read(self, member: Member, version: int, tensors: Sequence[SharedTensor]) -> bool:
        try:
            with known_form():
                await in_time(self._take(member, version, tensors), self._settings.update_timeout_s, "update_timeout_s")
        except FAULTS as error:
            self._roster.lose(member, f"did not read version {version} in GPU memory: {error}")
            return False
        return True

    async def _take(self, member: Member, version: int, tensors: Sequence[SharedTensor]) -> None:
        if member.process is None:
            raise UpdateRefusedError("was not started by the run, which does not know its GPUs")
        await member.restore_memory()
        member.group = WeightGroup(f"version-{version}", "", 0, 0, "ipc")
        first = int(member.name.rpartition("-")[2]) * self._settings.tensor_parallel
        own = self._gpus[first : first + self._settings.tensor_parallel]
        await self._adapter.read(member.connection, [pickled(tensors, gpu) for gpu in own])


class _Tensor:
    """Pickled as what PyTorch makes of a tensor of a GPU for another process: a call that opens its memory there."""

    def __init__(self, tensor: TensorDescription, memory: SharedMemory) -> None:
        self._tensor = tensor
        self._memory = memory

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        told, memory = self._tensor, self._memory
        shape = torch.Size(told.shape)
        layout = (torch.Tensor, shape, torch.empty(shape, device="meta").stride(), memory.start)
        kind = (
            torch.UntypedStorage,
            getattr(torch, told.dtype),
            memory.device,
        )  # a UUID: SGLang knows it under its own number
        place = (bytes.fromhex(memory.handle), memory.size, memory.offset, False)
        return rebuild_cuda_tensor, (
            *layout,
            *kind,
            *place,
            bytes.fromhex(memory.counter),
            memory.counter_offset,
            bytes.fromhex(memory.event),
            memory.waits,
        )


def pickled(tensors: Sequence[SharedTensor], gpu: int) -> bytes:
    """Names of tensors and where they lie on one GPU, as SGLang reads them: it takes pickles alone, of the functions
    on its list (`SafeUnpickler`). areal reads none.

    Raises:
        UpdateRefusedError: no rank of the trainer has this GPU.
    """
    named: list[tuple[str, _Tensor]] = []
    for shared in tensors:
        memory = next((copy for copy in shared.copies if copy.gpu == gpu), None)
        if memory is None:
            raise UpdateRefusedError(f"has GPU {gpu}, on which no rank of the trainer is")
        named.append((shared.tensor.name, _Tensor(shared.tensor, memory)))
    return pickle.dumps(named, protocol=4)
