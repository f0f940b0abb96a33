"""Weights that servers read in the memory of the trainer's GPUs, on which they stand themselves (CUDA IPC)."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.errors import RunError
from areal_core.servers.errors import FAULTS, in_time, known_form
from areal_core.servers.pool import State

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from areal_core.interfaces import SharedMemory, SharedTensor, TensorDescription, WeightUpdate
    from areal_core.servers.pool import Member, ServerPool
    from areal_core.servers.updating import Updater
    from areal_sglang.adapter import SGLangAdapter


class Reading:
    """Has the servers that gave their memory to the trainer read its weights, part by part.

    All of them read, or none does: who did not would wait for a folder of the same weights every time. A server that
    fails once ends it for good, for memory that it cannot open ends SGLang itself.

    Args:
        adapter: speaks to the servers.
        pool: the servers.
        updater: changes their weights otherwise.
        timeout_s: for each part.
    """

    def __init__(self, adapter: SGLangAdapter, pool: ServerPool, updater: Updater, timeout_s: float) -> None:
        self._adapter = adapter
        self._pool = pool
        self._updater = updater
        self._timeout_s = timeout_s
        self._readers: list[Member] = []
        self._names: set[str] = set()
        self._version = -1
        self._fault = ""

    async def read(self, version: int, tensors: Sequence[SharedTensor]) -> list[int]:
        """See `TensorReader.read_tensors`: a server that fails is taken out and catches up later."""
        if not tensors:
            await self._begin(version)
        else:
            copies = {one.name: [pickled(tensors, gpu) for gpu in one.gpus] for one in self._readers}
            await self._try(lambda one: self._adapter.read(one.connection, copies[one.name]))
            self._names |= {shared.tensor.name for shared in tensors}
        if not self._readers:
            raise RunError(f"no server reads weights in GPU memory: {self._fault or self._pool.explain()}")
        return [gpu for member in self._readers for gpu in member.gpus]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`: who has read every tensor needs nothing but the version's name."""
        readers, self._readers = self._readers, []
        if update.path is None and self._version == update.version:
            missing = {tensor.name for tensor in update.tensors} ^ self._names
            self._readers = [] if missing else readers
            await self._try(lambda one: self._adapter.end_reading(one.connection, one.label(update.version)))
            for member in self._readers:
                member.has_read = update.version
        await self._updater.update_weights(update)

    async def _begin(self, version: int) -> None:
        await self._updater.agree()
        held = [member for member in self._pool.those(State.UPDATING) if not member.has_memory]
        self._version, self._names, self._readers = version, set(), []
        if others := [member.name for member in held if not member.gpus]:
            self._fault = self._fault or f"of {', '.join(others)} the run does not know the GPUs"
        if not self._fault:
            self._readers = held
            await self._try(self._prepare)

    async def _prepare(self, member: Member) -> None:
        await member.wake_up()
        await self._adapter.begin_reading(member.connection)

    async def _try(self, ask: Callable[[Member], Coroutine[None, None, None]]) -> None:
        """Ask all readers something; those that fail are lost, and read no more."""

        async def succeeds(member: Member) -> bool:
            try:
                with known_form():
                    await in_time(ask(member), self._timeout_s, "update_timeout_s")
            except FAULTS as error:
                self._fault = f"{member.name} did not read version {self._version}: {error}"
                self._pool.lose(member, f"did not read version {self._version} in GPU memory: {error}")
                return False
            return True

        have = await asyncio.gather(*map(succeeds, self._readers))
        self._readers = [member for member, has in zip(self._readers, have, strict=True) if has]


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


def pickled(tensors: Sequence[SharedTensor], gpu: int) -> bytes:
    """Names of tensors and where they lie on one GPU, as SGLang takes them. areal itself reads no pickle."""
    named = [
        (shared.tensor.name, _Tensor(shared.tensor, next(copy for copy in shared.copies if copy.gpu == gpu)))
        for shared in tensors
    ]
    return pickle.dumps(named, protocol=4)
