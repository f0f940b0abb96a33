"""Starting processes that connect back to whoever started them, and waiting until they are ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_core.errors import RunError
from areal_core.interfaces.launcher import EndMeans, Needs, ProcessSpecification
from areal_core.messages.channels import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.interfaces.launcher import Processes, RunningProcess
    from areal_core.messages.channels import Channel, Server


class ReadyWorker(NamedTuple):
    """A worker that has come.

    Attributes:
        process: of it.
        channel: to it.
        ready: the message with which it says that it is ready.
    """

    process: RunningProcess
    channel: Channel
    ready: Any


class WorkerServer:
    """The socket at which workers of one kind arrive.

    Args:
        address: of it.
        processes: starts them.
        role: of the workers in the run.
        ready: the kind of message with which a worker says that it is ready.
        timeout_s: within which it says so.
        greeting: what each is told first; None for nothing.
        speaks: see `ProcessSpecification`.
    """

    def __init__(
        self,
        address: str,
        processes: Processes,
        *,
        role: str,
        ready: type,
        timeout_s: float,
        greeting: object = None,
        speaks: bool = False,
    ) -> None:
        self.address = address
        self._processes = processes
        self._role = role
        self._ready = ready
        self._timeout_s = timeout_s
        self._greeting = greeting
        self._speaks = speaks
        self._arriving: dict[str, asyncio.Future[tuple[Channel, Any]]] = {}
        self._closing = asyncio.Event()
        self._server: Server | None = None

    async def listen(self) -> None:
        """Let workers in from now on."""
        self._server = await serve(self.address, self._welcome)

    async def start(self, name: str, command: Sequence[str]) -> ReadyWorker:
        """Start one and wait until it is ready.

        Raises:
            RunError: it has ended before, or takes too long; with its own words.
        """
        arriving = self._arriving[name] = asyncio.get_running_loop().create_future()
        needs, end = Needs(cores=1), EndMeans.REPLACED
        process = await self._processes.start(
            ProcessSpecification(name, self._role, command, needs=needs, end=end, speaks=self._speaks)
        )
        exited = asyncio.ensure_future(process.wait())
        try:
            waited: set[asyncio.Future[Any]] = {arriving, exited}
            await asyncio.wait(waited, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                how = exited.result().describe() if exited.done() else f"took longer than {self._timeout_s:g} s"
                raise RunError(f"a {self._role} process is not ready: it {how}")
        except BaseException:
            await process.end()  # it is in nobody's list; one that is only slow would come in the place of the next one
            raise
        exited.cancel()
        return ReadyWorker(process, *arriving.result())

    def close(self) -> None:
        """Let nobody in any more, and close the channels to all."""
        self._closing.set()
        if self._server is not None:
            self._server.close()

    async def _welcome(self, channel: Channel) -> None:
        arriving = self._arriving.get(channel.peer)
        if arriving is None or arriving.done():
            return
        if self._greeting is not None:
            channel.post(self._greeting)
        ready = await channel.receive()
        if isinstance(ready, self._ready) and not arriving.done():
            arriving.set_result((channel, ready))
            await self._closing.wait()  # the channel closes when this returns
