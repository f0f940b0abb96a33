"""Weights that servers read in the memory of the trainer's GPUs, on which they stand themselves (CUDA IPC)."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from areal_core.engines import SharedMemory, SharedTensor, TensorDescription, WeightUpdate
    from areal_core.servers import InferenceServer, ServerFleet
    from areal_sglang.adapter import SGLangAdapter


class Reading:
    """Lets the servers that freed their GPU memory copy the trainer's weights from there, part by part.

    Either all of them read or none does: a server that does not would wait for a folder of the same weights each time.
    After one failure no server reads any more, because SGLang ends if it cannot open memory.

    Args:
        adapter: speaks to the servers.
        fleet: has the servers, and changes their weights otherwise.
    """

    def __init__(self, adapter: SGLangAdapter, fleet: ServerFleet) -> None:
        self._adapter = adapter
        self._fleet = fleet
        self._readers: list[InferenceServer] = []
        self._names: set[str] = set()
        self._version = -1
        self._fault = ""

    async def read(self, version: int, tensors: Sequence[SharedTensor]) -> list[int]:
        """See `InferenceEngine.read_tensors`. A server that fails is lost, and synced later."""
        if not tensors:
            await self._begin(version)
        else:
            copies = {server.name: [pickled(tensors, gpu) for gpu in server.gpus] for server in self._readers}
            await self._call_readers(lambda server: self._adapter.read(server.connection, copies[server.name]))
            self._names |= {shared.tensor.name for shared in tensors}
        if not self._readers:
            raise RunError(f"no server reads weights in GPU memory: {self._fault or self._fleet.pool.explain()}")
        return [gpu for server in self._readers for gpu in server.gpus]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`. A server that has read every tensor needs only the version's label."""
        readers, self._readers = self._readers, []
        if update.path is None and self._version == update.version:
            missing = {tensor.name for tensor in update.tensors} ^ self._names
            self._readers = [] if missing else readers
            await self._call_readers(
                lambda server: self._adapter.end_reading(server.connection, server.label(update.version))
            )
            for server in self._readers:
                server.read_version = update.version
        await self._fleet.lifecycle.update_weights(update)

    async def _begin(self, version: int) -> None:
        asleep = await self._fleet.begin_update()
        self._version, self._names, self._readers = version, set(), []
        if unplaced := [server.name for server in asleep if not server.gpus]:
            self._fault = self._fault or f"of {', '.join(unplaced)} the run does not know the GPUs"
        if not self._fault:
            self._readers = asleep
            await self._call_readers(self._prepare)

    async def _prepare(self, server: InferenceServer) -> None:
        await server.wake_up()
        await self._adapter.begin_reading(server.connection)

    async def _call_readers(self, call: Callable[[InferenceServer], Awaitable[None]]) -> None:
        """Make a call to all readers. Those that fail are lost, and read no more."""
        purpose = f"read version {self._version} in GPU memory"
        failures = await self._fleet.call_servers(self._readers, call, purpose)
        for name, error in failures.items():
            self._fault = f"{name} did not read version {self._version}: {error}"
        self._readers = [server for server in self._readers if server.name not in failures]


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
