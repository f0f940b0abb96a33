"""Messages as frames. A message is a tagged msgspec struct; a frame is what travels, whoever sends or receives it.

A frame is a magic word, a length, and the msgpack array `[number, kind, message]`: number 0 for a message that nobody
answers, above 0 for a request, and the negated number of the request for its reply. A receiver builds only classes
that were declared as messages, and msgspec checks every field against its annotation: what arrives is data of known
types and can never be code.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from areal_core.errors import LostError, RunError

if TYPE_CHECKING:
    import socket

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"ARL3"
_LARGEST = (1 << 32) - 1
LARGEST_HELLO = 1 << 16
"""Bytes of a frame from somebody who has not shown yet who it is."""
_KINDS: dict[str, type[Message]] = {}


class PeerClosed(RunError):  # noqa: N818 - the end of a stream is no fault of its reader
    """The peer is gone or the connection was closed; nothing more will ever arrive."""


class PeerCorrupt(PeerClosed):
    """What arrived is no frame of this protocol. The connection is closed: where the next frame begins is unknown."""


class Message(msgspec.Struct, array_like=True):
    """Base of all messages. Fields are JSON values, bytes, paths, dataclasses, and sequences and mappings of them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[f"{cls.__module__}.{cls.__qualname__}"] = cls


class Frame(NamedTuple):
    """A message that has arrived, and its number."""

    message: Any
    number: int


class Failed(Message):
    """The reply to a request that failed: an error of areal, as it is told.

    Attributes:
        text: what is wrong.
        hints: what can be done.
        is_loss: see `LostError`.
    """

    text: str
    hints: tuple[str, ...] = ()
    is_loss: bool = False

    @property
    def error(self) -> RunError:
        """What the requester raises."""
        return (LostError if self.is_loss else RunError)(self.text, hints=self.hints)


class Done(Message):
    """The reply to a request that has no other answer than that it was done."""


def _encode_other(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_header = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])


@cache
def _decoder(kind: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_KINDS[kind], dec_hook=lambda wanted, value: wanted(value))


def encode_frame(message: Message, number: int = 0) -> bytearray:
    """A message's frame.

    Raises:
        TypeError: it is no message, or a field is of a type that cannot be sent.
        ValueError: it is larger than a frame may be, or a number in it than 64 bits.
    """
    kind = f"{type(message).__module__}.{type(message).__qualname__}"
    if _KINDS.get(kind) is not type(message):
        raise TypeError(f"{type(message).__name__} is not declared as a message")
    frame = bytearray(_PREFIX.size)
    try:
        _encoder.encode_into((number, kind, message), frame, _PREFIX.size)
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(frame) > _LARGEST:
        raise ValueError(f"a message {type(message).__name__} is too large: {len(frame)} bytes")
    _PREFIX.pack_into(frame, 0, _MAGIC, len(frame))
    return frame


class FrameDecoder:
    """Turns a stream of bytes, cut anywhere, into messages.

    Args:
        largest_first: bytes that the first frame may have; few where it says who sends.
    """

    __slots__ = ("_buffer", "_largest", "_missing")

    def __init__(self, largest_first: int = _LARGEST) -> None:
        self._largest = largest_first
        self._buffer = bytearray()
        self._missing = _PREFIX.size

    @property
    def missing(self) -> int:
        """Bytes of the frame that has begun which have not come; never more than it has."""
        return self._missing - len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The messages that `data` completes.

        Raises:
            PeerCorrupt: the bytes are no frame of a known message; the decoder must not be fed again.
        """
        self._buffer += data
        if len(self._buffer) < self._missing:  # a large frame arrives in thousands of pieces
            return []
        frames: list[Frame] = []
        start, size = 0, len(self._buffer)
        self._missing = _PREFIX.size
        while size - start >= _PREFIX.size:
            magic, length = _PREFIX.unpack_from(self._buffer, start)
            if magic != _MAGIC or not _PREFIX.size < length <= self._largest:
                raise PeerCorrupt("the peer does not speak the protocol of this connection")
            if size - start < length:
                self._missing = length
                break
            with memoryview(self._buffer) as view:
                frames.append(_decode(view[start + _PREFIX.size : start + length]))
            self._largest = _LARGEST
            start += length
        del self._buffer[:start]
        return frames


def _decode(body: memoryview) -> Frame:
    try:
        number, kind, message = _header.decode(body)
        if kind not in _KINDS:
            raise PeerCorrupt(f"a message arrived that is not known here: {kind:.80}")
        return Frame(_decoder(kind).decode(message), number)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise PeerCorrupt(f"a frame arrived that is not of the form of a message: {error!s:.200}") from None


def send(connection: socket.socket, message: Message, number: int = 0) -> None:
    """Write a message whole, on a socket that blocks; for programs of one thread.

    Raises:
        PeerClosed: the peer is gone.
        TypeError, ValueError: see `encode_frame`.
    """
    try:
        connection.sendall(encode_frame(message, number))
    except OSError as error:
        raise PeerClosed(f"the peer closed the connection ({error})") from None


def receive(connection: socket.socket) -> Frame:
    """The next message, on a socket that blocks.

    Raises:
        PeerClosed: the peer is gone.
        TimeoutError: the socket's own time-out has passed; the connection can no longer be used.
    """
    decoder, wanted = FrameDecoder(), _PREFIX.size
    while True:
        try:
            data = connection.recv(wanted)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerClosed(f"the peer closed the connection ({error})") from None
        if not data:
            raise PeerClosed("the peer closed the connection")
        if frames := decoder.feed(data):
            return frames[0]
        wanted = decoder.missing
