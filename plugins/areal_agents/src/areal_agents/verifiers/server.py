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
from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.foreign_server import ServerConnection, ServerKeeper
from areal_agents.verifiers.process import taskset_program
from areal_agents.verifiers.traces import Traces

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from areal_agents.foreign_process import ServerProcess
    from areal_agents.verifiers.config import VerifiersSettings
    from areal_agents.verifiers.traces import Trace
    from areal_core.sdk import Endpoint

NO_KEY = "AREAL_NO_KEY"
"""An environment variable that is never set: the keys of episodes are in the names of models."""


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
        program = None if settings.address else taskset_program(settings)
        self._keeper = ServerKeeper(
            settings,
            f"verifiers' taskset {settings.taskset_id}",
            program,
            lambda process: _Connection(settings, process),
        )

    async def play(self, task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Trace]:
        """Play an episode, and return its traces by identifier.

        The environment's requests to the model have the trace's identifier in the header `X-Session-ID`.

        Args:
            task: data of the task, from a row of the data set.
            endpoint: of the model.

        Raises:
            EnvironmentServerError: the episode failed, or the server was lost.
        """
        # verifiers keeps a client for each config, with 1 MB of certificates. So all episodes have the same config, and
        # the key of an episode is in the name of the model.
        client = {"type": "eval", "base_url": endpoint.base_url, "api_key_var": NO_KEY}
        model = f"{endpoint.model}@{endpoint.api_key}"
        request = {"task_data": dict(task), "client": client, "model": model, "sampling": {}}
        return await (await self._keeper.connected()).play(request)

    async def close(self) -> None:
        """End the server."""
        await self._keeper.close()


class _Request:
    """A request in progress."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.traces = Traces()


class _Connection(ServerConnection):
    """A connection over ZeroMQ."""

    def __init__(self, settings: VerifiersSettings, process: ServerProcess | None) -> None:
        import zmq.asyncio

        address = process.address if process else str(settings.address)
        super().__init__(settings, f"the server of verifiers' taskset {settings.taskset_id} at {address}", process)
        self._requests: dict[bytes, _Request] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    async def play(self, request: Mapping[str, Any]) -> dict[str, Trace]:
        """Play an episode. A cancelled call cancels the episode in the server."""
        identifier = uuid.uuid4().hex
        try:
            sent, reply = await self.run(self._send(identifier, b"run", request))
        except asyncio.CancelledError:
            with suppress(Exception):
                payload = msgspec.msgpack.encode({"request_id": identifier})
                await self._socket.send_multipart([uuid.uuid4().hex.encode(), b"cancel", payload])
            raise
        if not reply.get("success"):
            raise EnvironmentServerError(f"{self._title} refused the request: {reply.get('error')}")
        try:
            return sent.traces.finish(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentServerError(f"{self._title} sent a reply that cannot be read: {error!r}") from error

    async def ask_health(self) -> None:
        """Return when the server has answered; see `ServerConnection`."""
        _, reply = await self._send(uuid.uuid4().hex, b"health", {})
        if not reply.get("success"):
            raise EnvironmentServerError(f"refused a health check: {reply.get('error')}")

    async def release(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def watchers(self) -> list[Coroutine[Any, Any, str]]:
        """Return coroutines that return why the server is lost; see `ServerConnection`."""
        return [self._receive(), *super().watchers()]

    async def _send(
        self, identifier: str, method: bytes, message: Mapping[str, Any]
    ) -> tuple[_Request, dict[str, Any]]:
        request = self._requests[identifier.encode()] = _Request()
        try:
            await self._socket.send_multipart([identifier.encode(), method, msgspec.msgpack.encode(message)])
            return request, await request.reply
        finally:
            del self._requests[identifier.encode()]

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
