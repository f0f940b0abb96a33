"""Connections between processes: messages and requests in both directions, over unix sockets or TCP.

An address is `unix:/path` or `tcp:host:port`. The process that connects sends a `Hello` with the run's credentials
first. From then on both ends are equal: each may `notify` the other, and `request` something of it.

    peer = await connect(address, timeout_s=10)      server = await serve("tcp:127.0.0.1:0", handler)
    peer.notify(Announce(...))                       async def handler(peer):
    reply = await peer.request(Lookup(...), 5, ...)      message, number = await peer.receive_request()
                                                         peer.reply(number, ...)

Programs without an event loop use `connect_blocking` with `frames.send` and `frames.receive`, or a `LoopThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.background import start_task, start_thread
from areal_core.errors import RunError
from areal_core.runtime import frames
from areal_core.runtime.environment import ATTEMPT_VARIABLE, TOKEN_VARIABLE
from areal_core.runtime.frames import (
    LARGEST_HELLO,
    Done,
    Failed,
    Frame,
    FrameDecoder,
    Message,
    PeerClosed,
    PeerCorrupt,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
    from concurrent.futures import Future

__all__ = [
    "Credentials",
    "Done",
    "Failed",
    "FrameDecoder",
    "Hello",
    "LoopThread",
    "Message",
    "Peer",
    "PeerClosed",
    "PeerCorrupt",
    "PeerRefused",
    "Refused",
    "Server",
    "adopt",
    "connect",
    "connect_blocking",
    "connect_once",
    "encode_frame",
    "private_folder",
    "serve",
    "socket_parent",
]

HELLO_TIMEOUT_S = 30.0
"""Seconds in which a process that connects must send its hello."""
IDLE_S = 10
"""Seconds without data on a TCP connection after which the kernel probes the other host."""
PROBE_INTERVAL_S = 5
"""Seconds between two probes."""
UNANSWERED_PROBES = 4
"""Probes without an answer after which the kernel closes the connection."""
UNACKNOWLEDGED_MS = 90_000
"""Milliseconds in which the other host must acknowledge data or a probe. More than `rollout.blocked_timeout_s`, after
which a worker ends itself: the kernel of a blocked process with a full buffer acknowledges nothing more."""
RETRY_S = 0.02
"""Seconds between two tries to connect."""
BACKLOG = 4096
"""Connections that may wait to be accepted. All processes of a large run connect at the same time."""
ACROSS_ATTEMPTS = ("guard", "node")
"""Names of peers that are accepted with an older attempt. A guard reports the exit of a member that has outlived its
attempt, and a node serves the whole run."""
_LONGEST_SOCKET_PATH = 100
"""Bytes of a socket's path that are safe: the kernel takes 107."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process shows to be accepted. All processes of one attempt of a run have the same.

    Attributes:
        token: secret of the run. Without one, only unix sockets are served, which other users cannot reach.
        attempt: number of the attempt.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import Credentials, PeerRefused, connect, serve
        >>> async def main():
        ...     mine, others = Credentials.create(attempt=1), Credentials.create(attempt=1)
        ...     server = await serve("tcp:127.0.0.1:0", lambda peer: peer.receive(), lambda: mine)
        ...     peer = await connect(server.address, 5, credentials=others)
        ...     try:
        ...         await peer.receive()
        ...     except PeerRefused as error:
        ...         print(error)
        ...     server.close()
        >>> asyncio.run(main())
        the token is another run's
        >>> sorted(Credentials("secret", attempt=1).as_environment())
        ['AREAL_ATTEMPT', 'AREAL_TOKEN']
    """

    token: str = ""
    attempt: int = 0

    @classmethod
    def create(cls, attempt: int) -> Credentials:
        """Return credentials with a new token."""
        return cls(secrets.token_hex(16), attempt)

    @classmethod
    def from_environment(cls) -> Credentials:
        """Return the credentials that this process was started with; empty ones outside a run."""
        return cls.from_variables(os.environ)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Credentials:
        """Return the credentials in the environment of a process that is to be started."""
        return cls(variables.get(TOKEN_VARIABLE, ""), int(variables.get(ATTEMPT_VARIABLE, "0")))

    def as_environment(self) -> dict[str, str]:
        """Return the variables that give these credentials to a new process."""
        return {TOKEN_VARIABLE: self.token, ATTEMPT_VARIABLE: str(self.attempt)}

    def refusal(self, hello: Hello) -> str:
        """Return why a peer is refused; an empty text if it is accepted."""
        if not secrets.compare_digest(self.token.encode(), hello.token.encode(errors="replace")):
            return "the token is another run's"
        is_older = hello.attempt < self.attempt
        if hello.attempt != self.attempt and not (is_older and hello.name in ACROSS_ATTEMPTS):
            return f"attempt {hello.attempt} of the run is over: it is in attempt {self.attempt}"
        return ""


class Hello(Message):
    """The first message on every connection, from the process that connects.

    Attributes:
        token: see `Credentials`.
        attempt: see `Credentials`.
        name: of the process, or the purpose of the connection.
    """

    token: str
    attempt: int
    name: str


class Refused(Message):
    """The answer to a `Hello` that is not accepted. The connection closes behind it."""

    reason: str


class PeerRefused(PeerClosed):
    """The peer has refused the credentials in this end's hello. The message is the reason."""


class Peer(asyncio.Protocol):
    """One end of a connection. `serve`, `connect` and `adopt` make it.

    `notify` only queues a message. Everything that is queued in one turn of the event loop leaves as a single write:
    with thousands of small messages a second, system calls would otherwise cost more than the messages.

    There is no flow control. The protocols bound what is in flight themselves: a process sends a request after the
    reply to the one before it, or has a fixed number of them.

    Attributes:
        name: the name in the other end's hello; empty at the end that connected.
    """

    def __init__(self, on_connected: Callable[[Peer], object] | None = None) -> None:
        self.name = ""
        self._on_connected = on_connected
        self._decoder = FrameDecoder(LARGEST_HELLO) if on_connected else FrameDecoder()
        self._received: asyncio.Queue[Frame | None] = asyncio.Queue()
        """Messages that are not replies; None behind the last one."""
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        """Requests without a reply, by number."""
        self._outgoing: list[bytearray] = []
        self._transport: asyncio.Transport | None = None
        self._closed: PeerClosed | None = None
        self._is_half_closed = False

    @property
    def own_host(self) -> str:
        """The address of this machine by which the peer of a TCP connection reaches it."""
        assert self._transport is not None
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def is_sending(self) -> bool:
        """Whether a sent message has not left completely. One that exceeds the socket's buffer leaves in parts."""
        if self._transport is None or self._closed is not None:
            return False
        return bool(self._outgoing) or self._transport.get_write_buffer_size() > 0

    def notify(self, message: Message, number: int = 0) -> None:
        """Send a message. It leaves within this turn of the event loop.

        Args:
            message: the message.
            number: 0, or the negated number of a request that this answers.

        Raises:
            PeerClosed: the peer is gone.
            TypeError, ValueError: the message cannot be encoded.
        """
        if self._closed is not None:
            raise self._closed
        frame = encode_frame(message, number)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(frame)

    async def request(self, message: Message, timeout_s: float | None, waiting_for: str) -> Any:
        """Send a message and return its reply.

        Args:
            message: the request.
            timeout_s: seconds until the reply must be here; None for a request that has a deadline of its own.
            waiting_for: what the reply contains, for the error message.

        Raises:
            PeerClosed: the peer is gone; `PeerRefused` if it has refused this connection.
            RunError: the reply is `Failed`, or did not come in time.
        """
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            self.notify(message, number)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            raise RunError(f"no answer within {timeout_s:g} s: waited for {waiting_for}") from None
        finally:
            del self._replies[number]
        if isinstance(reply, Failed):
            raise reply.error
        return reply

    async def receive(self) -> Any:
        """Return the next message that is not a reply.

        Raises:
            PeerClosed: the connection is closed, and all messages before its end were received. `PeerRefused` if the
                peer has refused it.
        """
        message, _ = await self.receive_request()
        return message

    async def receive_request(self) -> tuple[Any, int]:
        """Return the next message and its number for `reply`. Raises like `receive`."""
        return self._message_of(await self._received.get())

    def receive_ready(self) -> list[tuple[Any, int]]:
        """Return all received messages with their numbers, without waiting. Raises like `receive`."""
        return [self._message_of(self._received.get_nowait()) for _ in range(self._received.qsize())]

    def reply(self, number: int, message: Message) -> None:
        """Answer the request with this number. Do nothing if the message had no number, or if the peer is gone."""
        if number:
            with contextlib.suppress(PeerClosed):
                self.notify(message, -number)

    def end(self) -> None:
        """Close this direction of the connection. Messages of the peer still arrive until it closes its own."""
        self._flush()
        self._is_half_closed = True
        if self._transport is not None and self._closed is None:
            with contextlib.suppress(OSError):  # the peer has reset the connection, which the loop reports later
                self._transport.write_eof()

    async def close(self) -> None:
        """Send what is queued and close the connection. A second call does nothing."""
        self._flush()
        self._set_closed(PeerClosed("the connection was closed"))
        if self._transport is not None:
            self._transport.close()
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Close the connection immediately and drop what is queued."""
        self._set_closed(PeerClosed("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    def _message_of(self, frame: Frame | None) -> tuple[Any, int]:
        if frame is None:
            self._received.put_nowait(None)  # the next call raises the same error
            assert self._closed is not None
            raise self._closed
        return frame

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._outgoing = []
        if not outgoing or self._transport is None or self._closed is not None or self._is_half_closed:
            return
        if not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def _set_closed(self, reason: PeerClosed) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._received.put_nowait(None)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(reason)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`: the connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have no class of asyncio's
        _detect_dead_host(transport.get_extra_info("socket"))
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`: bytes have arrived."""
        try:
            arrived = self._decoder.feed(data)
        except PeerCorrupt as error:
            self._set_closed(error)
            assert self._transport is not None
            self._transport.abort()
            return
        for frame in arrived:
            if isinstance(frame.message, Refused) and self._on_connected is None:
                self._set_closed(PeerRefused(frame.message.reason))
                return
            if frame.number >= 0:
                self._received.put_nowait(frame)
                continue
            future = self._replies.get(-frame.number)
            if future is not None and not future.done():  # else the request has timed out
                future.set_result(frame.message)

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`: the peer has closed its direction, and the transport closes the other one."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`: the connection is closed."""
        cause = f" ({exc})" if exc else ""
        self._set_closed(PeerClosed(f"the peer closed the connection{cause}"))


class Server:
    """A listening socket.

    Attributes:
        address: where peers reach it.
    """

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self.address = address

    def close(self) -> None:
        """Stop accepting connections. Open connections stay."""
        self._server.close()


async def serve(
    address: str, handler: Callable[[Peer], Awaitable[None]], credentials: Callable[[], Credentials] | None = None
) -> Server:
    """Listen on an address.

    Args:
        address: `unix:/path`, or `tcp:host:0` for a free port.
        handler: runs once for each accepted connection, which is closed when it returns. It may raise `PeerClosed`.
            Another exception is a fault of this program, and ends it.
        credentials: returns the credentials that peers must show now; by default those of this process.

    Raises:
        OSError: the socket cannot be made.
        ValueError: the address has another form, or it is a TCP address and the credentials have no token.

    Example:
        >>> import asyncio
        >>> from areal_core.errors import RunError
        >>> from areal_core.processes import Done, Failed, Message, Peer, connect, private_folder, serve
        >>> class Remember(Message):
        ...     key: str
        ...     value: float
        >>> async def answer(peer: Peer) -> None:
        ...     known = {}
        ...     while True:  # until `PeerClosed`
        ...         question, number = await peer.receive_request()
        ...         is_new = question.key not in known
        ...         known[question.key] = question.value
        ...         peer.reply(number, Done() if is_new else Failed(f"{question.key} is known already"))
        >>> async def main():
        ...     with private_folder() as folder:
        ...         server = await serve(f"unix:{folder / 'memory.sock'}", answer)
        ...         peer = await connect(server.address, 5)
        ...         print(await peer.request(Remember("loss", 0.5), 5, "the memory's answer"))
        ...         try:
        ...             await peer.request(Remember("loss", 0.25), 5, "the memory's answer")
        ...         except RunError as error:
        ...             print(error)
        ...         await peer.close()
        ...         server.close()
        >>> asyncio.run(main())
        Done()
        loss is known already
    """
    accepted = credentials or Credentials.from_environment
    scheme, _, location = address.partition(":")

    async def handle(peer: Peer) -> None:
        try:
            hello = await _receive_hello(peer)
            reason = accepted().refusal(hello) if isinstance(hello, Hello) else "the first message is not a hello"
            if reason:
                peer.notify(Refused(reason))
                return
            peer.name = hello.name
            await handler(peer)
        except PeerClosed:
            pass
        finally:
            await peer.close()

    def make_peer() -> Peer:
        return Peer(lambda peer: start_task(handle(peer), f"connection to {address}"))

    loop = asyncio.get_running_loop()
    if scheme == "unix":
        return Server(await loop.create_unix_server(make_peer, path=location), address)
    if scheme != "tcp":
        raise ValueError(f"'{address}' is not an address: write unix:/path or tcp:host:port")
    if not accepted().token:
        raise ValueError("a TCP socket is served only behind a token")
    host, _, port = location.rpartition(":")
    server = await loop.create_server(make_peer, host, int(port), backlog=BACKLOG)
    return Server(server, f"tcp:{host}:{server.sockets[0].getsockname()[1]}")


async def _receive_hello(peer: Peer) -> Any:
    """Return the first message of a peer. Raises `PeerClosed` also if it does not come in time."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await peer.receive()
    except TimeoutError:
        raise PeerClosed(f"no hello came within {HELLO_TIMEOUT_S:g} s") from None


async def connect(address: str, timeout_s: float, name: str = "", credentials: Credentials | None = None) -> Peer:
    """Connect to a server and send the hello. Retry until the server is there.

    Args:
        address: see `serve`.
        timeout_s: seconds until the server must have accepted, also if its host answers no packets at all.
        name: of this process, or the purpose of the connection.
        credentials: shown to the server; by default those of this process.

    Raises:
        TimeoutError: nothing accepted the connection in time.
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
    """Connect to a server that is there, and send the hello; see `connect`.

    There is no timeout: if the host answers no packets, the kernel gives up after minutes.

    Raises:
        OSError: nothing listens on the address.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import PeerClosed, connect_once, private_folder, serve
        >>> async def accept(peer):
        ...     pass  # when the handler returns, its connection is closed
        >>> async def main():
        ...     with private_folder() as folder:
        ...         address = f"unix:{folder / 'server.sock'}"
        ...         try:
        ...             await connect_once(address)
        ...         except FileNotFoundError:
        ...             print("nothing listens")
        ...         server = await serve(address, accept)
        ...         peer = await connect_once(address)
        ...         try:
        ...             await peer.receive()
        ...         except PeerClosed as error:
        ...             print(error)
        ...         server.close()
        >>> asyncio.run(main())
        nothing listens
        the peer closed the connection
    """
    loop = asyncio.get_running_loop()
    scheme, _, location = address.partition(":")
    if scheme == "unix":
        _, peer = await loop.create_unix_connection(Peer, path=location)
    else:
        host, _, port = location.rpartition(":")
        _, peer = await loop.create_connection(Peer, host, int(port))
    peer.notify(_hello(name, credentials))
    return peer


async def adopt(connection: socket.socket) -> Peer:
    """Return a peer for a connected socket, whose hello is sent or not needed."""
    _, peer = await asyncio.get_running_loop().create_connection(Peer, sock=connection)
    return peer


def connect_blocking(
    address: str, timeout_s: float, name: str = "", credentials: Credentials | None = None
) -> socket.socket:
    """Connect to a server that is there, send the hello, and return the blocking socket; see `connect`.

    Raises:
        OSError: nothing listens on the address; `TimeoutError` after `timeout_s` seconds.
        PeerClosed: the server has closed the connection before the hello.
    """
    scheme, _, location = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(location)
    else:
        host, _, port = location.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout_s)
    _detect_dead_host(connection)
    frames.send(connection, _hello(name, credentials))
    return connection


def _detect_dead_host(connection: socket.socket) -> None:
    """Let the kernel close a TCP connection whose other host is gone. Do nothing for a unix socket.

    A host that loses power or its network sends no end of the connection. The kernel notices it after 90 s:

        idle connection          unanswered probes, which begin after `IDLE_S` seconds
        data on its way          no acknowledgement within `UNACKNOWLEDGED_MS`

    A process that hangs or is stopped still acknowledges, because its kernel does. The connection is closed only if
    the process does not read for 90 s and its receive buffer is full.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, IDLE_S),
        (socket.TCP_KEEPINTVL, PROBE_INTERVAL_S),
        (socket.TCP_KEEPCNT, UNANSWERED_PROBES),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _hello(name: str, credentials: Credentials | None) -> Hello:
    shown = credentials or Credentials.from_environment()
    return Hello(shown.token, shown.attempt, name)


class LoopThread:
    """An event loop in a thread, for a program whose main thread computes.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import LoopThread
        >>> thread = LoopThread("downloads")
        >>> future = thread.start(asyncio.sleep(0.01, result="later"))
        >>> thread.call(asyncio.sleep(0, result="now"))
        'now'
        >>> future.result()
        'later'
        >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = start_thread(self._run, name)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the thread, and so must not wait for what the loop does."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            for task in (tasks := asyncio.all_tasks(self.loop)):
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine in the thread; the future gets its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the thread and return its result."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancel what still runs, and end the thread. A second call does nothing.

        Do not call it in the thread itself: it waits until the thread has ended.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


def socket_parent() -> Path:
    """Return the folder in which folders for sockets are made: the temporary folder, or /tmp if its path is long.

    The kernel limits a socket's path to 107 bytes, and some clusters have a long TMPDIR.
    """
    temporary = tempfile.gettempdir()
    longest = os.fsencode(temporary) + b"/areal-scratch-abcdefgh/controller.sock"
    return Path(temporary if len(longest) <= _LONGEST_SOCKET_PATH else "/tmp")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for sockets that only this user can enter, and remove it when the block ends."""
    with tempfile.TemporaryDirectory(prefix="areal-", dir=socket_parent(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)
