"""The wire format: messages are msgspec structs, and each travels as one frame.

    | magic "ARL3" | length, 4 bytes, little endian | msgpack array [number, kind, message] |

`length` counts the whole frame. `kind` is the class of the message. `number` pairs requests with replies:

    0     a message without a reply
    n     request n of the sender
    -n    the reply to the receiver's request n

A receiver builds only classes that derive from `Message`, and msgspec checks every field against its annotation. A
frame therefore contains data of known types, and never code.
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
"""Bytes of the largest frame: its length has four bytes."""
LARGEST_HELLO = 1 << 16
"""Bytes of the largest first frame of a connection, whose sender has not shown its credentials yet."""
_KINDS: dict[str, type[Message]] = {}
"""All message classes by their full names, which frames contain."""


class PeerClosed(RunError):  # noqa: N818 - the end of a stream is no fault of its reader
    """The connection is closed, or the peer is gone. Nothing more will arrive."""


class PeerCorrupt(PeerClosed):
    """The received bytes are no frame. The connection is closed, because the next frame cannot be located."""


def _kind_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Message(msgspec.Struct, array_like=True):
    """Base class of all messages. Fields are JSON values, bytes, paths, dataclasses, and sequences and mappings of
    these."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[_kind_of(cls)] = cls


class Frame(NamedTuple):
    """A received message and its number."""

    message: Any
    number: int


class Failed(Message):
    """The reply to a request that failed.

    Attributes:
        text: what is wrong.
        hints: what the user can do about it.
        is_loss: whether `error` is a `LostError`.
    """

    text: str
    hints: tuple[str, ...] = ()
    is_loss: bool = False

    @property
    def error(self) -> RunError:
        """The exception that the requester raises."""
        error_type = LostError if self.is_loss else RunError
        return error_type(self.text, hints=self.hints)


class Done(Message):
    """The reply to a request that succeeded and has no result."""


def encode_frame(message: Message, number: int = 0) -> bytearray:
    """Return the frame of a message.

    Raises:
        TypeError: `message` is not a `Message`, or the type of a field cannot be sent.
        ValueError: the frame is larger than 4 GiB, or an integer has more than 64 bits.
    """
    kind = _kind_of(type(message))
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
        largest_first: limit in bytes for the first frame.
    """

    __slots__ = ("_buffer", "_largest", "_needed")

    def __init__(self, largest_first: int = _LARGEST) -> None:
        self._largest = largest_first
        self._buffer = bytearray()
        self._needed = _PREFIX.size
        """Bytes that the buffer must have for the next frame, or for its prefix, to be complete."""

    @property
    def missing(self) -> int:
        """Bytes that the frame, or its prefix, still lacks."""
        return self._needed - len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the messages that `data` completes.

        Raises:
            PeerCorrupt: the bytes are no frame of a known message. The decoder must not be fed again.
        """
        self._buffer += data
        if len(self._buffer) < self._needed:  # a large frame arrives in thousands of pieces
            return []
        frames: list[Frame] = []
        start = 0
        size = len(self._buffer)
        self._needed = _PREFIX.size
        while size - start >= _PREFIX.size:
            magic, length = _PREFIX.unpack_from(self._buffer, start)
            if magic != _MAGIC or not _PREFIX.size < length <= self._largest:
                raise PeerCorrupt("the peer does not speak the protocol of this connection")
            if size - start < length:
                self._needed = length
                break
            with memoryview(self._buffer) as view:
                frames.append(_decode(view[start + _PREFIX.size : start + length]))
            self._largest = _LARGEST
            start += length
        del self._buffer[:start]
        return frames


def send(connection: socket.socket, message: Message, number: int = 0) -> None:
    """Write a whole message to a blocking socket.

    Raises:
        PeerClosed: the peer is gone.
        TypeError, ValueError: the message cannot be encoded; see `encode_frame`.
    """
    try:
        connection.sendall(encode_frame(message, number))
    except OSError as error:
        raise PeerClosed(f"the peer closed the connection ({error})") from None


def receive(connection: socket.socket) -> Frame:
    """Read the next message from a blocking socket.

    Raises:
        PeerClosed: the peer is gone.
        TimeoutError: the socket's timeout has passed. The connection can no longer be used.
    """
    decoder = FrameDecoder()
    while True:
        try:
            data = connection.recv(decoder.missing)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerClosed(f"the peer closed the connection ({error})") from None
        if not data:
            raise PeerClosed("the peer closed the connection")
        frames = decoder.feed(data)
        if frames:
            return frames[0]


def _encode_other(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_body_decoder = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])


@cache
def _message_decoder(kind: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_KINDS[kind], dec_hook=lambda wanted, value: wanted(value))


def _decode(body: memoryview) -> Frame:
    try:
        number, kind, message = _body_decoder.decode(body)
        if kind not in _KINDS:
            raise PeerCorrupt(f"a message arrived that is not known here: {kind:.80}")
        return Frame(_message_decoder(kind).decode(message), number)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise PeerCorrupt(f"a frame arrived that is not of the form of a message: {error!s:.200}") from None
