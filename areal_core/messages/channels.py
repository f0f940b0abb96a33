"""Connections between processes, for programs with an event loop; `blocking` has the end for those without one.

An address is `unix:/path` or `tcp:host:port`. Whoever connects says hello with the run's credentials. Everything that
is sent within one turn of the event loop becomes a single write: with thousands of small messages a second the system
calls would otherwise cost more than the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.messages.codec import ChannelClosed, ChannelCorrupt, Frame, FrameDecoder, encode_frame
from areal_core.messages.credentials import Credentials, Failed, Hello, Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_LONGEST_SOCKET_PATH = 100
HELLO_TIMEOUT_S = 30.0
_LARGEST_HELLO = 1 << 16
RETRY_S = 0.02
BACKLOG = 4096
"""Connections that wait to be let in; all nodes of a large run come at once."""


class Channel(asyncio.Protocol):
    """One end of a connection, in an event loop. Made by `serve` and `connect`.

    Senders are bounded by what they send about: a request is answered before the next one, or there are so many of
    them. So nothing here ever waits for a peer that reads slowly.

    Attributes:
        peer: the name that the other side gave in its hello; empty on the side that connected.
    """

    def __init__(self, on_connected: Callable[[Channel], object] | None = None) -> None:
        self.peer = ""
        self._on_connected = on_connected
        self._decoder = FrameDecoder(_LARGEST_HELLO) if on_connected else FrameDecoder()
        self._received: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._closed: ChannelClosed | None = None

    @property
    def own_host(self) -> str:
        """The address of this machine on a TCP connection, as the peer may reach it."""
        assert self._transport is not None
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def is_sending(self) -> bool:
        """Whether something that was posted has not left yet. What is larger than the socket's buffer leaves in parts,
        one in each turn of the event loop."""
        if self._transport is None or self._closed is not None:
            return False
        return bool(self._outgoing) or self._transport.get_write_buffer_size() > 0

    def post(self, message: Any, number: int = 0) -> None:
        """Queue a message; it leaves within this turn of the event loop.

        Args:
            message: to send.
            number: of a request that this answers, negated; 0 for a message by itself.

        Raises:
            ChannelClosed: the peer is gone.
            TypeError, ValueError: the message cannot be encoded.
        """
        if self._closed is not None:
            raise self._closed
        pieces = encode_frame(message, number)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing += pieces

    async def request(self, message: Any, timeout_s: float | None, waiting_for: str) -> Any:
        """Send a message and wait for its reply.

        Args:
            message: to send.
            timeout_s: for the reply; None where what is asked for has a deadline of its own.
            waiting_for: what the reply brings, in words, for the error.

        Raises:
            ChannelClosed: the peer is gone.
            RunError: the peer answered with `Failed`, or not in time.
        """
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.post(message, number)
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError:
            raise RunError(f"no answer within {timeout_s:g} s: waited for {waiting_for}") from None
        finally:
            del self._replies[number]
        if isinstance(answer, Failed):
            raise RunError(answer.text, hints=answer.hints)
        return answer

    async def receive(self) -> Any:
        """The next message that is no reply.

        Raises:
            ChannelClosed: the stream has ended and everything that came before was received.
        """
        return (await self.receive_request())[0]

    async def receive_request(self) -> tuple[Any, int]:
        """The next message and its number, with which `reply` answers it. Raises as `receive`."""
        return self._take(await self._received.get())

    def receive_ready(self) -> list[Any]:
        """All messages that have arrived, without waiting; empty where none has. Raises as `receive`."""
        return [self._take(self._received.get_nowait())[0] for _ in range(self._received.qsize())]

    def reply(self, number: int, message: Any) -> None:
        """Answer a request; a requester that is gone is no error."""
        if number:
            with contextlib.suppress(ChannelClosed):
                self.post(message, -number)

    async def close(self) -> None:
        """Write what is queued and close; safe to call twice."""
        self._flush()
        self._end(ChannelClosed("the channel was closed"))
        if self._transport is not None:
            self._transport.close()
        await asyncio.sleep(0)

    def _take(self, frame: Frame | None) -> tuple[Any, int]:
        if frame is None:
            self._received.put_nowait(None)  # whoever asks again is told the same
            assert self._closed is not None
            raise self._closed
        return frame

    def _flush(self) -> None:
        pieces, self._outgoing = self._outgoing, []
        if self._transport is not None and self._closed is None and pieces:
            self._transport.writelines(pieces)

    def _end(self, reason: ChannelClosed) -> None:
        if self._closed is None:
            self._closed = reason
            self._received.put_nowait(None)
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_exception(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol: the connection stands."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol: bytes have arrived."""
        try:
            frames = self._decoder.feed(data)
        except ChannelCorrupt as error:
            self._end(error)
            assert self._transport is not None
            self._transport.abort()
            return
        for frame in frames:
            if frame.number >= 0:
                self._received.put_nowait(frame)
            elif (waiting := self._replies.get(-frame.number)) is not None and not waiting.done():
                waiting.set_result(frame.message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol: the peer is gone."""
        self._end(ChannelClosed("the peer closed the channel" + (f" ({exc})" if exc else "")))


class Server:
    """A socket that is listened on; `address` is where others reach it."""

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self.address = address

    def close(self) -> None:
        """Accept nobody any more; connections that stand go on."""
        self._server.close()


async def serve(
    address: str, handler: Callable[[Channel], Awaitable[None]], credentials: Callable[[], Credentials] | None = None
) -> Server:
    """Listen; `handler` runs once for each connection that is let in, which is closed when it returns.

    Args:
        address: `unix:/path`, or `tcp:host:0` for a free port.
        handler: of a connection; it ends quietly with `ChannelClosed`.
        credentials: gives those that others must show now; by default those of this process.

    Raises:
        OSError: the socket cannot be made.
        ValueError: TCP without a token, or an address of another form.
    """
    accepted = credentials or Credentials.from_environment
    scheme, _, place = address.partition(":")

    async def handle(channel: Channel) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await channel.receive()
            reason = accepted().refusal(hello) if isinstance(hello, Hello) else "the first message is no hello"
            if reason:
                channel.post(Refused(reason))
                return
            channel.peer = hello.name
            await handler(channel)
        except (ChannelClosed, TimeoutError):
            pass
        finally:
            await channel.close()

    def make() -> Channel:
        return Channel(lambda channel: start_task(handle(channel), f"connection to {address}"))

    loop = asyncio.get_running_loop()
    if scheme == "unix":
        return Server(await loop.create_unix_server(make, path=place), address)
    if scheme != "tcp":
        raise ValueError(f"'{address}' is no address: write unix:/path or tcp:host:port")
    if not accepted().token:
        raise ValueError("a TCP socket is served only behind a token")
    host, _, port = place.rpartition(":")
    server = await loop.create_server(make, host, int(port), backlog=BACKLOG)
    return Server(server, f"tcp:{host}:{server.sockets[0].getsockname()[1]}")


async def connect(address: str, timeout_s: float, name: str = "", credentials: Credentials | None = None) -> Channel:
    """Connect to an address that a peer serves, or will serve within `timeout_s` seconds, and say hello.

    Args:
        address: see `serve`.
        timeout_s: for the peer to be there.
        name: of this process or its purpose.
        credentials: to show; by default those of this process.

    Raises:
        TimeoutError: nobody serves the address in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    scheme, _, place = address.partition(":")
    shown = credentials or Credentials.from_environment()
    while True:
        try:
            if scheme == "unix":
                _, channel = await loop.create_unix_connection(Channel, path=place)
            else:
                host, _, port = place.rpartition(":")
                _, channel = await loop.create_connection(Channel, host, int(port))
        except (FileNotFoundError, ConnectionError):
            if loop.time() > deadline:
                raise TimeoutError(f"nobody listens on {address} after {timeout_s:g} s") from None
            await asyncio.sleep(RETRY_S)
        else:
            channel.post(Hello(shown.token, shown.epoch, name))
            return channel


@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder, for sockets, that only this user can enter; it goes when the block ends."""
    folder = tempfile.mkdtemp(prefix="areal-", dir=parent)
    if len(folder) > _LONGEST_SOCKET_PATH - len("/socket"):
        # The kernel limits a socket's path to 108 bytes; a long TMPDIR must not stop a run.
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="areal-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
