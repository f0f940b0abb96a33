"""The typed channel between the processes of one run: frames over a Unix domain socket, and no pickle.

A frame is a fixed prefix (magic, header length, payload length), a JSON header that names the message's kind and its
fields, and raw bytes. What a process receives is data of known types and can never be code. The asyncio end gathers
everything that is sent within one turn of the event loop into a single write: with thousands of small messages a
second the system calls would otherwise cost more than the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ARL1"
_LARGEST_HEADER = 1 << 28
_LARGEST_PAYLOAD = 1 << 36
_UNREAD_LIMIT = 1 << 26
"""Bytes that may wait unread before the socket is no longer read; the peer then feels the pressure."""

_LONGEST_SOCKET_PATH = 100
_JOIN_BELOW = 1 << 16
"""Payloads shorter than this are copied into the joined write; longer ones are written as they are."""


class ChannelClosed(RunError):  # noqa: N818 - the end of a stream is no fault of its reader
    """The peer is gone or the channel was closed; nothing more will ever arrive."""


class ChannelCorrupt(ChannelClosed):
    """What arrived is no frame of this protocol. The channel is closed: where the next frame begins is unknown."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: what the message is; the receiver chooses by it.
        fields: JSON values by name.
        payload: raw bytes, of a layout that `kind` and `fields` determine.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def encode_message(message: Message) -> bytes:
    """The prefix and the header of a message's frame; its payload follows behind them.

    Raises:
        TypeError: a field is no JSON value.
        ValueError: the header or the payload is larger than a frame may be.
    """
    header = json.dumps([message.kind, message.fields], separators=(",", ":")).encode()
    if len(header) > _LARGEST_HEADER or len(message.payload) > _LARGEST_PAYLOAD:
        raise ValueError(f"message '{message.kind}' is too large: {len(header)} + {len(message.payload)} bytes")
    return _PREFIX.pack(_MAGIC, len(header), len(message.payload)) + header


class FrameDecoder:
    """Turns a stream of bytes, cut anywhere, into messages."""

    __slots__ = ("_buffer", "_missing")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._missing = 0

    def feed(self, data: bytes) -> list[tuple[Message, int]]:
        """The messages that `data` completes, each with the bytes that its frame had.

        Raises:
            ChannelCorrupt: the bytes are no frame; the decoder must not be fed again.
        """
        self._buffer += data
        # A large payload arrives in thousands of pieces; until it is complete there is nothing to look at.
        if len(self._buffer) < self._missing:
            return []
        found: list[tuple[Message, int]] = []
        start = 0
        while len(self._buffer) - start >= _PREFIX.size:
            magic, header_length, payload_length = _PREFIX.unpack_from(self._buffer, start)
            if magic != _MAGIC or header_length > _LARGEST_HEADER or payload_length > _LARGEST_PAYLOAD:
                raise ChannelCorrupt("the peer does not speak the protocol of this channel")
            payload_start = start + _PREFIX.size + header_length
            end = payload_start + payload_length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                header = bytes(view[start + _PREFIX.size : payload_start])
                payload = bytes(view[payload_start:end])
            found.append((_message(header, payload), end - start))
            start = end
        del self._buffer[:start]
        self._missing = 0
        if len(self._buffer) >= _PREFIX.size:
            _, header_length, payload_length = _PREFIX.unpack_from(self._buffer)
            self._missing = _PREFIX.size + header_length + payload_length
        return found


def _message(header: bytes, payload: bytes) -> Message:
    try:
        value = json.loads(header)
    except ValueError:
        raise ChannelCorrupt("a frame arrived whose header is not JSON") from None
    match value:
        case [str(kind), dict(fields)]:
            return Message(kind, fields, payload)
    raise ChannelCorrupt("a frame arrived whose header has not the form [kind, fields]")


class Channel(asyncio.Protocol):
    """One end of a connection, in an event loop. Made by `serve` and `connect`."""

    def __init__(self, on_connected: Callable[[Channel], None] | None = None) -> None:
        self._on_connected = on_connected
        self._decoder = FrameDecoder()
        self._received: deque[tuple[Message, int]] = deque()
        self._unread_bytes = 0
        self._receiver: asyncio.Future[None] | None = None
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed: ChannelClosed | None = None
        self._transport: asyncio.Transport | None = None

    async def send(self, message: Message) -> None:
        """Hand over a message; returns when it is queued, or later where the peer reads too slowly.

        Raises:
            ChannelClosed: the peer is gone.
            TypeError, ValueError: the message cannot be encoded.
        """
        self.post(message)
        if not self._writable.is_set():
            await self._writable.wait()
            if self._closed is not None:
                raise self._closed

    def post(self, message: Message) -> None:
        """Queue a message without ever waiting, for senders that are bounded by something else. Raises as `send`."""
        if self._closed is not None:
            raise self._closed
        head = encode_message(message)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(head)
        if message.payload:
            self._outgoing.append(message.payload)
        self._outgoing_bytes += len(head) + len(message.payload)
        if self._outgoing_bytes > _JOIN_BELOW:
            # Handed over at once, so that a sender that never yields still meets the transport's back-pressure.
            self._flush()

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ChannelClosed: the stream has ended and everything that came before was received.
        """
        while not self._received:
            if self._closed is not None:
                raise self._closed
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver
        return self._take()

    def receive_ready(self) -> list[Message]:
        """Everything that has arrived, without waiting; empty where nothing has.

        Raises:
            ChannelClosed: the stream has ended and everything that came before was received.
        """
        if not self._received and self._closed is not None:
            raise self._closed
        return [self._take() for _ in range(len(self._received))]

    async def close(self) -> None:
        """Write what is queued and close; safe to call twice."""
        self._flush()
        self._end(ChannelClosed("the channel was closed"))
        if self._transport is not None:
            self._transport.close()
        await asyncio.sleep(0)

    def _take(self) -> Message:
        message, size = self._received.popleft()
        before, self._unread_bytes = self._unread_bytes, self._unread_bytes - size
        if before > _UNREAD_LIMIT >= self._unread_bytes and self._transport is not None and self._closed is None:
            self._transport.resume_reading()
        return message

    def _flush(self) -> None:
        pieces, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        if self._transport is None or self._closed is not None or not pieces:
            return
        small: list[bytes] = []
        for piece in pieces:
            if len(piece) < _JOIN_BELOW:
                small.append(piece)
                continue
            self._transport.write(b"".join(small))
            self._transport.write(piece)
            small = []
        self._transport.write(b"".join(small))

    def _end(self, reason: ChannelClosed) -> None:
        if self._closed is None:
            self._closed = reason
        self._writable.set()
        self._wake()

    def _wake(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol: the connection stands."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol: bytes have arrived."""
        try:
            found = self._decoder.feed(data)
        except ChannelCorrupt as error:
            self._end(error)
            assert self._transport is not None
            self._transport.abort()
            return
        if not found:
            return
        self._received += found
        before, self._unread_bytes = self._unread_bytes, self._unread_bytes + sum(size for _, size in found)
        if before <= _UNREAD_LIMIT < self._unread_bytes and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol: the peer is gone."""
        self._end(ChannelClosed("the peer closed the channel" + (f" ({exc})" if exc else "")))

    def pause_writing(self) -> None:
        """Part of asyncio's protocol: the peer reads too slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Part of asyncio's protocol: there is room again."""
        self._writable.set()


@contextlib.contextmanager
def private_socket_path() -> Iterator[Path]:
    """A path for a socket in a new folder that only this user can enter; the folder goes when the block ends."""
    folder = tempfile.mkdtemp(prefix="areal-")
    if len(folder) > _LONGEST_SOCKET_PATH - len("/socket"):
        # The kernel limits a socket's path to 108 bytes; a long TMPDIR must not stop a run.
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="areal-", dir="/tmp")
    try:
        yield Path(folder) / "socket"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def serve(path: Path, handler: Callable[[Channel], Awaitable[None]]) -> asyncio.Server:
    """Listen on `path`; `handler` runs once for each connection, which is closed when it returns.

    Raises:
        OSError: the socket cannot be made.
    """
    running: set[asyncio.Task[None]] = set()

    async def handle(channel: Channel) -> None:
        try:
            await handler(channel)
        except ChannelClosed:
            pass
        finally:
            await channel.close()

    def connected(channel: Channel) -> None:
        task = asyncio.get_running_loop().create_task(handle(channel))
        running.add(task)
        task.add_done_callback(running.discard)

    return await asyncio.get_running_loop().create_unix_server(lambda: Channel(connected), path=str(path))


async def connect(path: Path, timeout_s: float) -> Channel:
    """Connect to a socket that a peer serves, or will serve within `timeout_s` seconds.

    Raises:
        TimeoutError: nobody serves `path` in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            _, channel = await loop.create_unix_connection(Channel, path=str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            if loop.time() > deadline:
                raise TimeoutError(f"nobody listens on {path} after {timeout_s:g} s") from None
            await asyncio.sleep(0.02)
        else:
            return channel


class BlockingChannel:
    """One end of a connection, for a process without an event loop.

    Raises:
        TimeoutError: nobody serves `path` within `timeout_s` seconds.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._decoder = FrameDecoder()
        self._received: deque[Message] = deque()
        deadline = time.monotonic() + timeout_s
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._socket.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                self._socket.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody listens on {path} after {timeout_s:g} s") from None
                time.sleep(0.02)
            else:
                return

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Write a message whole.

        Raises:
            ChannelClosed: the peer is gone.
            TimeoutError: the peer did not read for `timeout_s` seconds; the channel can no longer be used.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(encode_message(message))
            if message.payload:
                self._socket.sendall(message.payload)
        except TimeoutError:
            self.close()
            raise
        except OSError as error:
            raise ChannelClosed(f"the peer closed the channel ({error})") from None

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Raises:
            ChannelClosed: the peer is gone and everything that it had sent was received.
            TimeoutError: nothing came within `timeout_s` seconds; the channel can still be used.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._received:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"no message after {timeout_s:g} s")
            self._socket.settimeout(remaining)
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                raise TimeoutError(f"no message after {timeout_s:g} s") from None
            except OSError as error:
                raise ChannelClosed(f"the peer closed the channel ({error})") from None
            if not data:
                raise ChannelClosed("the peer closed the channel")
            self._received.extend(message for message, _ in self._decoder.feed(data))
        return self._received.popleft()

    def close(self) -> None:
        """Close; safe to call twice."""
        self._socket.close()
