"""A verifiers environment server: its process, and requests over its own wire (ZeroMQ and MessagePack).

A request has three frames, `[request id, method, payload]`, with the methods `run`, `cancel` and `health`. The server
sends `delta` frames while an episode runs, and one `reply` frame at its end; see verifiers.v1.serve (version 0.4).
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from areal_agents.environments.libraries import load_library
from areal_agents.verifiers.process import ServerProcess
from areal_agents.verifiers.traces import EnvironmentServerError, Traces
from areal_core.processes import start_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.verifiers.config import VerifiersSettings
    from areal_agents.verifiers.traces import Trace
    from areal_core.sdk import Endpoint

CHECKS = 4
"""Health checks within `silence_timeout_s`."""
NO_KEY = "AREAL_NO_KEY"
"""An environment variable that is never set. The keys of episodes are in headers."""


class EnvironmentServer:
    """The environment server of one rollout worker. The first episode starts it.

    When the server ends, hangs, or sends something that is not a message of the protocol, all episodes in progress fail
    with that reason, and the next episode starts another server.

    Args:
        settings: the taskset, and where the server is.

    Raises:
        ConfigError: pyzmq is not installed.
    """

    def __init__(self, settings: VerifiersSettings) -> None:
        load_library("the workflow verifiers", "zmq", "verifiers")
        self._settings = settings
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def play(self, task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Trace]:
        """Play an episode, and return its traces by identifier.

        The environment's requests to the model have the trace's identifier in the header `X-Session-ID`.

        Args:
            task: data of the task, from a row of the data set.
            endpoint: of the model.

        Raises:
            EnvironmentServerError: the episode failed, or the server was lost.
        """
        # verifiers replaces one of these headers by a key from its environment, which one depends on the protocol that
        # the environment speaks. The endpoint accepts an episode's key in either.
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "x-api-key": endpoint.api_key}
        client = {"type": "eval", "base_url": endpoint.base_url, "api_key_var": NO_KEY, "headers": headers}
        request = {"task_data": dict(task), "client": client, "model": endpoint.model, "sampling": {}}
        return await (await self._connected()).run(request)

    async def close(self) -> None:
        """End the server."""
        async with self._opening:
            if self._connection is not None:
                await self._connection.close()

    async def _connected(self) -> _Connection:
        async with self._opening:
            if self._connection is None or self._connection.loss:
                process = None if self._settings.address else await ServerProcess.start(self._settings)
                self._connection = _Connection(self._settings, process)
                await self._connection.wait_until_healthy()
            return self._connection


class _Request:
    """A request in progress."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.traces = Traces()


class _Connection:
    """A connection to one server, which is closed when the server is lost.

    Attributes:
        loss: why the server is lost; empty while it is not.
    """

    def __init__(self, settings: VerifiersSettings, process: ServerProcess | None) -> None:
        import zmq.asyncio

        address = process.address if process else str(settings.address)
        self.loss = ""
        self._settings = settings
        self._process = process
        self._title = f"the verifiers server of the taskset {settings.taskset_id} at {address}"
        self._requests: dict[bytes, _Request] = {}
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._keeper = start_task(self._keep(), "watching a verifiers server")

    async def wait_until_healthy(self) -> None:
        """Return when the server has answered.

        Raises:
            EnvironmentServerError: it did not answer within `start_timeout_s`.
        """
        limit = self._settings.start_timeout_s
        try:
            await self._ask_health(limit)
        except TimeoutError:
            await self.close(f"did not answer within start_timeout_s: {limit:g}")
            raise EnvironmentServerError(f"{self._title} {self.loss}") from None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Trace]:
        """Play an episode. A cancelled call cancels the episode in the server."""
        identifier = uuid.uuid4().hex
        try:
            sent, reply = await self._send(identifier, b"run", request)
        except asyncio.CancelledError:
            with suppress(Exception):
                payload = msgspec.msgpack.encode({"request_id": identifier})
                await self._socket.send_multipart([uuid.uuid4().hex.encode(), b"cancel", payload])
            raise
        try:
            return sent.traces.finish(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentServerError(f"{self._title} sent a reply that cannot be read: {error!r}") from error

    async def close(self, reason: str = "was closed") -> None:
        """End the connection, and the process if the worker has started it. Requests in progress fail."""
        if not self._closing.done():
            self._closing.set_result(reason)
        await asyncio.wait({self._keeper})

    async def _send(
        self, identifier: str, method: bytes, message: Mapping[str, Any]
    ) -> tuple[_Request, dict[str, Any]]:
        if self.loss:
            raise EnvironmentServerError(f"{self._title} {self.loss}")
        request = self._requests[identifier.encode()] = _Request()
        try:
            await self._socket.send_multipart([identifier.encode(), method, msgspec.msgpack.encode(message)])
            reply = await request.reply
        finally:
            del self._requests[identifier.encode()]
        if not reply.get("success"):
            raise EnvironmentServerError(f"{self._title} refused the request: {reply.get('error')}")
        return request, reply

    async def _ask_health(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self._send(uuid.uuid4().hex, b"health", {})

    async def _keep(self) -> None:
        """Wait until the server is lost or the connection is closed. Then fail the requests and release everything."""
        reasons = [self._closing, asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._check_health())]
        if self._process is not None:
            reasons.append(asyncio.ensure_future(self._process.wait()))
        done, waiting = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        self.loss = done.pop().result()
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(EnvironmentServerError(f"{self._title} {self.loss}"))
        for reason in waiting:
            reason.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._socket.close()
        self._context.term()
        if self._process is not None:
            await self._process.end()

    async def _receive(self) -> str:
        """Route messages to their requests. Return why the server is lost."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                identifier, kind, payload = frames
                message = msgspec.msgpack.decode(payload)
                request = self._requests.get(identifier)
                if request is None:  # its episode was cancelled
                    continue
                if kind == b"delta":
                    request.traces.apply(message)
                elif not request.reply.done():
                    request.reply.set_result(dict(message))
            except (ValueError, TypeError, KeyError, AttributeError, msgspec.MsgspecError) as error:
                return f"sent something that is not a message of verifiers' protocol: {error!r:.300}"

    async def _check_health(self) -> str:
        """Return why the server is lost. Its event loop answers within milliseconds, also beside long episodes."""
        limit = self._settings.silence_timeout_s
        while True:
            await asyncio.sleep(limit / CHECKS)
            try:
                await self._ask_health(limit)
            except TimeoutError:
                return f"did not answer for silence_timeout_s: {limit:g}"
