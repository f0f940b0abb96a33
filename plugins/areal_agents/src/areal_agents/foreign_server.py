"""The connection to an environment server, and its replacement when the server is lost.

    no connection -> connected -> lost (the process has ended, or a health check failed) -> a new connection

A lost connection fails the requests in progress with the reason. The next request opens a new connection, which starts
another process if the worker started the first one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from areal_agents.foreign_process import EnvironmentServerError
from areal_core.processes import start_task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from areal_agents.config import EnvironmentServerSettings
    from areal_agents.foreign_process import ForeignProgram, ServerProcess

T = TypeVar("T")

CHECKS = 4
"""Health checks within `silence_timeout_s`."""


class ServerConnection(ABC):
    """A connection to one server, which is closed when the server is lost.

    Args:
        settings: timeouts.
        title: name of the server, for messages.
        process: process of the server; None if the worker did not start it.

    Attributes:
        loss: why the server is lost; empty while it is not.
        process: process of the server; None if the worker did not start it.
    """

    def __init__(self, settings: EnvironmentServerSettings, title: str, process: ServerProcess | None) -> None:
        self.loss = ""
        self.process = process
        self._settings = settings
        self._title = title
        loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[str] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._is_healthy = asyncio.Event()
        self._keeper = start_task(self._keep(), "watching an environment server")

    @property
    def is_released(self) -> bool:
        """Whether the connection has ended, with the process."""
        return self._keeper.done()

    @abstractmethod
    async def ask_health(self) -> None:
        """Return when the server has answered a health check.

        Raises:
            EnvironmentServerError: the server is lost. The message continues a sentence about the server.
        """

    @abstractmethod
    async def release(self) -> None:
        """Release the connection's own resources. Called once, after the loss."""

    def watchers(self) -> list[Coroutine[Any, Any, str]]:
        """Return coroutines that return why the server is lost. They are cancelled at the end."""
        return [self._check_health()]

    async def wait_until_healthy(self) -> None:
        """Return when the server has answered. Its health is checked from then on.

        Raises:
            EnvironmentServerError: it cannot be reached, or has ended.
        """
        try:
            await self.run(self.ask_health())
        except EnvironmentServerError as error:
            await self.close(str(error))
            raise EnvironmentServerError(f"{self._title} {self.loss}") from None
        self._is_healthy.set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of some work with the server.

        Raises:
            EnvironmentServerError: the server was lost before the work was done.
        """
        task = asyncio.ensure_future(work)
        ends: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.wait({task})
        if self.loss and (task.cancelled() or task.exception() is not None):
            raise EnvironmentServerError(f"{self._title} {self.loss}")
        return task.result()

    async def raise_loss(self, timeout_s: float) -> None:
        """Return after a timeout if the server is not lost by then.

        Raises:
            EnvironmentServerError: the server is lost.
        """
        await asyncio.wait({self._lost}, timeout=timeout_s)
        if self.loss:
            raise EnvironmentServerError(f"{self._title} {self.loss}")

    async def close(self, reason: str = "was closed") -> None:
        """End the connection, and the process if the worker has started it. Requests in progress fail."""
        if not self._closing.done():
            self._closing.set_result(reason)
        await asyncio.wait({self._keeper})

    async def _keep(self) -> None:
        """Wait until the server is lost or the connection is closed. Then fail the requests and release everything."""
        reasons: list[asyncio.Future[str]] = [asyncio.ensure_future(watcher) for watcher in self.watchers()]
        reasons.append(self._closing)
        if self.process is not None:
            reasons.append(asyncio.ensure_future(self.process.wait()))
        done, waiting = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        self.loss = ended.result() if ended.exception() is None else f"cannot be watched: {ended.exception()!r}"
        self._lost.set_result(None)
        for reason in waiting:
            reason.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self.release()
        if self.process is not None:
            await self.process.end()

    async def _check_health(self) -> str:
        """Return why the server is lost. Its event loop answers within milliseconds, also beside long episodes."""
        limit = self._settings.silence_timeout_s
        await self._is_healthy.wait()
        while True:
            await asyncio.sleep(limit / CHECKS)
            try:
                async with asyncio.timeout(limit):
                    await self.ask_health()
            except TimeoutError:
                return f"did not answer for silence_timeout_s: {limit:g}"
            except EnvironmentServerError as error:
                return str(error)


C = TypeVar("C", bound=ServerConnection)


class ServerKeeper(Generic[C]):
    """Keeps the connection of one rollout worker to its server. The first episode opens it.

    Args:
        settings: timeouts.
        title: name of the server, for messages.
        program: server to start; None if it runs already.
        connect: opens a connection to a server; its argument is the process, or None.
    """

    def __init__(
        self,
        settings: EnvironmentServerSettings,
        title: str,
        program: ForeignProgram | None,
        connect: Callable[[ServerProcess | None], C],
    ) -> None:
        self.connection: C | None = None
        self._limit = settings.start_timeout_s
        self._title = title
        self._program = program
        self._connect = connect
        self._opening = asyncio.Lock()
        self._opening_task: asyncio.Task[C] | None = None
        self._is_closed = False
        self._lost: list[C] = []

    async def connected(self) -> C:
        """Return the connection. Open a new one if the server was lost.

        Raises:
            EnvironmentServerError: the server cannot be started, or does not answer within `start_timeout_s`.
        """
        async with self._opening:
            if self._is_closed:
                raise EnvironmentServerError(f"the server of {self._title} was closed")
            if self.connection is None or self.connection.loss:
                if self.connection is not None:
                    self._lost = [each for each in (*self._lost, self.connection) if not each.is_released]
                    self.connection = None
                self.connection = await self._started()
            return self.connection

    async def close(self) -> None:
        """End the connection. A server that is starting is ended, and no other one starts."""
        self._is_closed = True
        if self._opening_task is not None:
            self._opening_task.cancel()
            await asyncio.wait({self._opening_task})
        async with self._opening:
            connections = [*self._lost, *filter(None, [self.connection])]
            await asyncio.gather(*(connection.close() for connection in connections))  # a hung server takes seconds

    async def _started(self) -> C:
        self._opening_task = opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.wait({opening}, timeout=self._limit)
        finally:
            if not opening.done():
                opening.cancel()
                await asyncio.wait({opening})
        if opening.cancelled():
            limit = f"did not start and answer within start_timeout_s: {self._limit:g}"
            raise EnvironmentServerError(f"the server of {self._title} {'was closed' if self._is_closed else limit}")
        return opening.result()

    async def _open(self) -> C:
        process = await self._program.serve() if self._program else None
        try:
            connection = self._connect(process)
        except BaseException:
            if process is not None:
                await process.end()
            raise
        try:
            await connection.wait_until_healthy()
        except BaseException:
            await connection.close()
            raise
        return connection
