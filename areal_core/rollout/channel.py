"""The typed local channel between the processes of one run.

A message is a kind, a few JSON fields and raw bytes; nothing is ever unpickled. Frames go over a Unix domain socket:
a 16-byte prefix (magic, length of the header, length of the payload), the header as JSON, the payload as it is.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

_FRAME = struct.Struct("<4sIQ")  # magic, length of the header, length of the payload
_MAGIC = b"ARL1"
MAX_HEADER_BYTES = 64 * 2**20


class ChannelClosed(ConnectionError):
    """The other process closed the channel or died."""


class ChannelCorrupted(ConnectionError):
    """What arrived is not a message: something else speaks on this socket."""


@dataclass(slots=True)
class Message:
    """One message: what it is about, its JSON fields, and bytes that travel untouched."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    def encode(self) -> bytes:
        """The frame's prefix and header; the payload follows it on the wire.

        Raises:
            TypeError: a field is not JSON.
        """
        header = json.dumps([self.kind, self.fields], separators=(",", ":")).encode()
        return _FRAME.pack(_MAGIC, len(header), len(self.payload)) + header


def _lengths(prefix: bytes) -> tuple[int, int]:
    magic, header, payload = _FRAME.unpack(prefix)
    if magic != _MAGIC or header > MAX_HEADER_BYTES:
        raise ChannelCorrupted("what arrived on the channel is not a message of this run")
    return header, payload


def _decode(header: bytes, payload: bytes) -> Message:
    try:
        kind, fields = json.loads(header)
        return Message(kind, fields, payload)
    except (ValueError, TypeError) as error:
        raise ChannelCorrupted("the header of a message is not readable") from error


class Channel:
    """The asynchronous end. Messages sent within one turn of the event loop leave in one write."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._outgoing: list[bytes] = []

    def send(self, message: Message) -> None:
        """Queue a message; it leaves when the event loop next turns. A dead peer shows in `receive`."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._write)
        self._outgoing.append(message.encode())
        if message.payload:
            self._outgoing.append(message.payload)

    def _write(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not self._writer.is_closing():
            self._writer.write(b"".join(outgoing))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ChannelClosed: the peer closed the channel or died.
            ChannelCorrupted: the bytes are not a message.
        """
        try:
            header_length, payload_length = _lengths(await self._reader.readexactly(_FRAME.size))
            header = await self._reader.readexactly(header_length)
            payload = await self._reader.readexactly(payload_length) if payload_length else b""
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if isinstance(error, ChannelCorrupted):
                raise
            raise ChannelClosed("the other end of the channel is gone") from error
        return _decode(header, payload)

    async def close(self) -> None:
        """Write what is queued and close; safe to call twice."""
        if self._outgoing:
            self._write()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def serve(path: Path, handler: Callable[[Channel], Awaitable[None]]) -> asyncio.Server:
    """Listen on a Unix socket at `path`; `handler` has each connection until it returns."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            await handler(channel)
        finally:
            await channel.close()

    return await asyncio.start_unix_server(accept, path, limit=2**24)


async def connect(path: Path, timeout_s: float) -> Channel:
    """Connect to a socket that may not be there yet.

    Raises:
        TimeoutError: nobody listened for so long.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Channel(*await asyncio.open_unix_connection(path, limit=2**24))
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody listens on {path} after {timeout_s:g} s") from None
            await asyncio.sleep(0.05)


class BlockingChannel:
    """The synchronous end, for the trainer and for workers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> BlockingChannel:
        """Connect to a socket that may not be there yet.

        Raises:
            TimeoutError: nobody listened for so long.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(path))
                return cls(connection)
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody listens on {path} after {timeout_s:g} s") from None
                time.sleep(0.05)

    def send(self, message: Message) -> None:
        """Write a message.

        Raises:
            ChannelClosed: the peer closed the channel or died.
        """
        try:
            self._connection.settimeout(None)
            self._connection.sendall(message.encode())
            if message.payload:
                self._connection.sendall(message.payload)
        except ConnectionError as error:
            raise ChannelClosed("the other end of the channel is gone") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. After a time-out nothing is lost: the next call goes on where this one stopped.

        Raises:
            TimeoutError: nothing whole arrived for so long.
            ChannelClosed: the peer closed the channel or died.
            ChannelCorrupted: the bytes are not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_FRAME.size, deadline)
        header_length, payload_length = _lengths(bytes(self._buffer[: _FRAME.size]))
        end = _FRAME.size + header_length + payload_length
        self._fill(end, deadline)
        header = bytes(self._buffer[_FRAME.size : _FRAME.size + header_length])
        payload = bytes(self._buffer[_FRAME.size + header_length : end])
        del self._buffer[:end]
        return _decode(header, payload)

    def _fill(self, size: int, deadline: float | None) -> None:
        while len(self._buffer) < size:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError("no message arrived in time")
            self._connection.settimeout(remaining)
            try:
                received = self._connection.recv(max(65536, size - len(self._buffer)))
            except TimeoutError:
                continue
            except ConnectionError as error:
                raise ChannelClosed("the other end of the channel is gone") from error
            if not received:
                raise ChannelClosed("the other end of the channel is gone")
            self._buffer += received

    def close(self) -> None:
        """Close; safe to call twice."""
        self._connection.close()
