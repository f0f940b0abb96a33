"""Connections between processes: one class for both ends, in an event loop, and a facade for programs without one.

An address is `unix:/path` or `tcp:host:port`. Whoever connects says hello with the run's credentials. Everything that
is sent within one turn of the event loop becomes a single write: with thousands of small messages a second the system
calls would otherwise cost more than the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.background import start_task, start_thread
from areal_core.errors import RunError
from areal_core.messages.credentials import Credentials, Hello, Refused
from areal_core.messages.frames import LARGEST_HELLO, Failed, Frame, FrameDecoder, Message, PeerClosed, PeerCorrupt
from areal_core.messages.frames import encode_frame as _encode
from areal_core.messages.frames import send as _send

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from concurrent.futures import Future

_LONGEST_SOCKET_PATH = 100
HELLO_TIMEOUT_S = 30.0
RETRY_S = 0.02
BACKLOG = 4096
"""Connections that wait to be let in; all processes of a large run come at once."""


class Peer(asyncio.Protocol):
    """One end of a connection. Made by `serve`, `connect` and `adopt`.

    Senders are bounded by what they send about: a request is answered before the next one, or there are so many of
    them. So nothing here ever waits for a peer that reads slowly.

    Attributes:
        name: that the other side gave in its hello; empty on the side that connected.
    """

    def __init__(self, on_connected: Callable[[Peer], object] | None = None) -> None:
        self.name = ""
        self._on_connected = on_connected
        self._decoder = FrameDecoder(LARGEST_HELLO) if on_connected else FrameDecoder()
        self._received: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[bytearray] = []
        self._transport: asyncio.Transport | None = None
        self._closed: PeerClosed | None = None
        self._has_hung_up = False

    @property
    def own_host(self) -> str:
        """The address of this machine on a TCP connection, as the peer may reach it."""
        assert self._transport is not None
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def is_sending(self) -> bool:
        """Whether something that was sent has not left yet. What is larger than the socket's buffer leaves in parts,
        one in each turn of the event loop."""
        if self._transport is None or self._closed is not None:
            return False
        return bool(self._outgoing) or self._transport.get_write_buffer_size() > 0

    def notify(self, message: Message, number: int = 0) -> None:
        """Send a message; it leaves within this turn of the event loop.

        Args:
            message: to send.
            number: of a request that this answers, negated; 0 for a message by itself.

        Raises:
            PeerClosed: the peer is gone.
            TypeError, ValueError: the message cannot be encoded.
        """
        if self._closed is not None:
            raise self._closed
        frame = _encode(message, number)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(frame)

    async def request(self, message: Message, timeout_s: float | None, waiting_for: str) -> Any:
        """Send a message and wait for its reply.

        Args:
            message: to send.
            timeout_s: for the reply; None where what is asked for has a deadline of its own.
            waiting_for: what the reply brings, in words, for the error.

        Raises:
            PeerClosed: the peer is gone.
            RunError: the peer answered with `Failed`, or not in time.
        """
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.notify(message, number)
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError:
            raise RunError(f"no answer within {timeout_s:g} s: waited for {waiting_for}") from None
        finally:
            del self._replies[number]
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    async def receive(self) -> Any:
        """The next message that is no reply.

        Raises:
            PeerClosed: the stream has ended and everything that came before was received.
        """
        return (await self.receive_request())[0]

    async def receive_request(self) -> tuple[Any, int]:
        """The next message and its number, with which `reply` answers it. Raises as `receive`."""
        return self._take(await self._received.get())

    def receive_ready(self) -> list[tuple[Any, int]]:
        """All messages that have arrived and their numbers, without waiting. Raises as `receive`."""
        return [self._take(self._received.get_nowait()) for _ in range(self._received.qsize())]

    def reply(self, number: int, message: Message) -> None:
        """Answer a request; a requester that is gone is no error."""
        if number:
            with contextlib.suppress(PeerClosed):
                self.notify(message, -number)

    def end(self) -> None:
        """Say nothing more; what the other side still says is heard until it closes."""
        self._flush()
        self._has_hung_up = True
        if self._transport is not None and self._closed is None:
            with contextlib.suppress(OSError):  # a peer that reset the connection: the event loop is yet to say so
                self._transport.write_eof()

    async def close(self) -> None:
        """Write what is queued and close; safe to call twice."""
        self._flush()
        self._end(PeerClosed("the connection was closed"))
        if self._transport is not None:
            self._transport.close()
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Close at once, whatever is queued."""
        self._end(PeerClosed("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    def _take(self, frame: Frame | None) -> tuple[Any, int]:
        if frame is None:
            self._received.put_nowait(None)  # whoever asks again is told the same
            assert self._closed is not None
            raise self._closed
        return frame

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if not frames or self._transport is None or self._closed is not None or self._has_hung_up:
            return
        if not self._transport.is_closing():
            self._transport.writelines(frames)

    def _end(self, reason: PeerClosed) -> None:
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
        except PeerCorrupt as error:
            self._end(error)
            assert self._transport is not None
            self._transport.abort()
            return
        for frame in frames:
            if frame.number >= 0:
                self._received.put_nowait(frame)
            elif (waiting := self._replies.get(-frame.number)) is not None and not waiting.done():
                waiting.set_result(frame.message)

    def eof_received(self) -> bool:
        """Part of asyncio's protocol: the other side has hung up."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol: the peer is gone."""
        self._end(PeerClosed("the peer closed the connection" + (f" ({exc})" if exc else "")))


class Server:
    """A socket that is listened on; `address` is where others reach it."""

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self.address = address

    def close(self) -> None:
        """Accept nobody any more; connections that stand go on."""
        self._server.close()


async def serve(
    address: str, handler: Callable[[Peer], Awaitable[None]], credentials: Callable[[], Credentials] | None = None
) -> Server:
    """Listen; `handler` runs once for each connection that is let in, which is closed when it returns.

    Args:
        address: `unix:/path`, or `tcp:host:0` for a free port.
        handler: of a connection; it ends quietly with `PeerClosed`.
        credentials: gives those that others must show now; by default those of this process.

    Raises:
        OSError: the socket cannot be made.
        ValueError: TCP without a token, or an address of another form.
    """
    accepted = credentials or Credentials.from_environment
    scheme, _, place = address.partition(":")

    async def handle(peer: Peer) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await peer.receive()
            reason = accepted().refusal(hello) if isinstance(hello, Hello) else "the first message is not a hello"
            if reason:
                peer.notify(Refused(reason))
                return
            peer.name = hello.name
            await handler(peer)
        except (PeerClosed, TimeoutError):
            pass
        finally:
            await peer.close()

    def make() -> Peer:
        return Peer(lambda peer: start_task(handle(peer), f"connection to {address}"))

    loop = asyncio.get_running_loop()
    if scheme == "unix":
        return Server(await loop.create_unix_server(make, path=place), address)
    if scheme != "tcp":
        raise ValueError(f"'{address}' is not an address: write unix:/path or tcp:host:port")
    if not accepted().token:
        raise ValueError("a TCP socket is served only behind a token")
    host, _, port = place.rpartition(":")
    server = await loop.create_server(make, host, int(port), backlog=BACKLOG)
    return Server(server, f"tcp:{host}:{server.sockets[0].getsockname()[1]}")


async def connect(address: str, timeout_s: float, name: str = "", credentials: Credentials | None = None) -> Peer:
    """Connect to an address that a peer serves, or will serve within `timeout_s` seconds, and say hello.

    Args:
        address: see `serve`.
        timeout_s: for the peer to be there.
        name: of this process or its purpose.
        credentials: to show; by default those of this process.

    Raises:
        TimeoutError: nobody serves the address in time, or the host does not answer.
        OSError: the address cannot be reached at all.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(FileNotFoundError, ConnectionError):
                    return await connect_once(address, name, credentials)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise TimeoutError(f"nothing listens on {address} after {timeout_s:g} s") from None


async def connect_once(address: str, name: str = "", credentials: Credentials | None = None) -> Peer:
    """Connect to an address that a peer serves now, and say hello; see `connect`.

    There is no timeout: a host that does not answer may take minutes.

    Raises:
        OSError: nobody serves the address.
    """
    loop = asyncio.get_running_loop()
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        _, peer = await loop.create_unix_connection(Peer, path=place)
    else:
        host, _, port = place.rpartition(":")
        _, peer = await loop.create_connection(Peer, host, int(port))
    shown = credentials or Credentials.from_environment()
    peer.notify(Hello(shown.token, shown.attempt, name))
    return peer


async def adopt(connection: socket.socket) -> Peer:
    """A peer for a socket that is connected already, behind its hello."""
    _, peer = await asyncio.get_running_loop().create_connection(Peer, sock=connection)
    return peer


def connect_blocking(
    address: str, timeout_s: float, name: str = "", credentials: Credentials | None = None
) -> socket.socket:
    """A socket that blocks, connected and behind its hello; `frames` sends and receives over it.

    Raises:
        OSError: nobody serves the address; `TimeoutError` where that took `timeout_s` seconds.
        PeerClosed: who serves it has gone before the hello.
    """
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(place)
    else:
        host, _, port = place.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout_s)
    shown = credentials or Credentials.from_environment()
    _send(connection, Hello(shown.token, shown.attempt, name))
    return connection


class LoopThread:
    """An event loop in a thread, for a program whose main thread computes."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        start_thread(self._run, name)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin a coroutine there; its result comes in a future of threads."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine there and wait for its result."""
        return self.start(work).result()


def socket_parent() -> Path:
    """Where folders with sockets are made: the folder for temporary files, or /tmp where a long TMPDIR would stop a
    run. The kernel limits a socket's path to 107 bytes."""
    longest = os.fsencode(tempfile.gettempdir()) + b"/areal-scratch-abcdefgh/controller.sock"
    return Path(tempfile.gettempdir() if len(longest) <= _LONGEST_SOCKET_PATH else "/tmp")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder, for sockets, that only this user can enter; it goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="areal-", dir=socket_parent(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)
