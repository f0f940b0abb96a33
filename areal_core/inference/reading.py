"""Weights that servers read in the memory of the trainer's GPUs, on which they run themselves (CUDA IPC)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.inference.errors import FAULTS, in_time, known_form
from areal_core.inference.server import State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from areal_core.inference.adapter import ServerAdapter
    from areal_core.inference.lifecycle import Lifecycle
    from areal_core.inference.pool import ServerPool
    from areal_core.inference.server import InferenceServer
    from areal_core.interfaces.inference import SharedMemory, SharedTensor, WeightUpdate


class Reading:
    """Lets the servers that freed their GPU memory copy the trainer's weights from there, part by part.

    Either all of them read or none does: a server that does not would wait for a folder of the same weights each time.
    After one failure no server reads any more, because a server may end if it cannot open memory.

    Args:
        adapter: speaks to the servers.
        pool: the servers.
        lifecycle: announces an update before servers read.
    """

    def __init__(self, adapter: ServerAdapter, pool: ServerPool, lifecycle: Lifecycle) -> None:
        self._adapter = adapter
        self._pool = pool
        self._lifecycle = lifecycle
        self._readers: list[InferenceServer] = []
        self._names: set[str] = set()
        self._version = -1
        self._fault = ""

    async def read(self, version: int, tensors: Sequence[SharedTensor]) -> list[int]:
        """See `InferenceEngine.read_tensors`. A server that fails is lost, and synced later."""
        if tensors:
            described = [shared.tensor for shared in tensors]
            await self._call_readers(
                lambda server: self._adapter.read(
                    server.connection, described, [copies_on(gpu, tensors) for gpu in server.gpus]
                )
            )
            self._names |= {tensor.name for tensor in described}
        else:
            await self._begin(version)
        if not self._readers:
            raise RunError(f"no server reads weights in GPU memory: {self._fault or self._pool.explain()}")
        return [gpu for server in self._readers for gpu in server.gpus]

    async def end(self, update: WeightUpdate) -> None:
        """Let servers that have read every tensor of an update take over its version, before it is applied.

        Those that have read only a part, or another version, are lost: they hold weights of several versions.
        """
        if update.path is None:
            if self._version == update.version and self._names == {tensor.name for tensor in update.tensors}:
                await self._call_readers(
                    lambda server: self._adapter.end_reading(server.connection, server.label(update.version))
                )
                for server in self._readers:
                    server.read_version = update.version
            else:
                self._lose_readers()
        self._readers = []

    async def _begin(self, version: int) -> None:
        await self._lifecycle.announce_update()
        self._lose_readers()  # a reading that broke off
        asleep = [server for server in self._pool.in_state(State.UPDATING) if not server.has_memory]
        self._version, self._names, self._readers = version, set(), []
        if unplaced := [server.name for server in asleep if not server.gpus]:
            self._fault = self._fault or f"the run does not know the GPUs of {', '.join(unplaced)}"
        if not self._fault:
            self._readers = asleep
            await self._call_readers(self._prepare)

    def _lose_readers(self) -> None:
        for server in self._readers:
            if server.state is State.UPDATING:  # else its process has ended meanwhile
                self._pool.lose(server, f"did not read all of version {self._version} in GPU memory")

    async def _prepare(self, server: InferenceServer) -> None:
        await server.wake_up()
        await self._adapter.begin_reading(server.connection)

    async def _call_readers(self, call: Callable[[InferenceServer], Awaitable[None]]) -> None:
        """Make a call to all readers, concurrently. Those that fail are lost, and read no more."""
        readers = self._readers
        errors = await asyncio.gather(*(self._error_of(server, call) for server in readers))
        for server, error in zip(readers, errors, strict=True):
            if error is not None:
                self._fault = f"{server.name} did not read version {self._version}: {error}"
        self._readers = [server for server, error in zip(readers, errors, strict=True) if error is None]

    async def _error_of(
        self, server: InferenceServer, call: Callable[[InferenceServer], Awaitable[None]]
    ) -> Exception | None:
        """Make a call to a server, and return its failure; None for none."""
        connection = server.connection
        try:
            with known_form():
                await in_time(call(server), self._adapter.settings.update_timeout_s, "update_timeout_s")
        except FAULTS as error:
            if server.connection is connection:  # else the driver has already replaced the process that failed
                self._pool.lose(server, f"did not read version {self._version} in GPU memory: {error}")
            return error
        return None


def copies_on(gpu: int, tensors: Sequence[SharedTensor]) -> list[SharedMemory]:
    """Return where each of some tensors is in the memory of a GPU."""
    return [next(copy for copy in shared.copies if copy.gpu == gpu) for shared in tensors]
