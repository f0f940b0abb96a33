"""Messages as frames. A message is a dataclass under `@message`; a frame is what travels.

A frame is a fixed prefix (magic, header length, payload length), a JSON header `[kind, number, fields]`, and raw
bytes: the value of the message's one field of type `bytes`, if it has one. `number` is 0 for a message that nobody
answers, above 0 for a request, and the negated number of the request for its reply. A receiver builds only dataclasses
that were declared as messages, and checks every field against its annotation: what arrives is data of known types and
can never be code.
"""

from __future__ import annotations

import json
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    Converter = Callable[[Any], Any]

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ARL2"
_LARGEST = 1 << 36
_KINDS: dict[str, type] = {}
_PAYLOADS: dict[type, str] = {}
_Message = TypeVar("_Message")


class ChannelClosed(RunError):  # noqa: N818 - the end of a stream is no fault of its reader
    """The peer is gone or the channel was closed; nothing more will ever arrive."""


class ChannelCorrupt(ChannelClosed):
    """What arrived is no frame of this protocol. The channel is closed: where the next frame begins is unknown."""


class Frame(NamedTuple):
    """A message that has arrived, and its number."""

    message: Any
    number: int


@dataclass_transform(frozen_default=True)
def message(cls: type[_Message]) -> type[_Message]:
    """Declare a class of annotated fields as a message: a frozen dataclass that channels carry.

    Fields are JSON values, sequences and mappings of them, further dataclasses, `Path`, and at most one `bytes`.
    """
    made = dataclass(frozen=True, slots=True)(cls)
    _KINDS[_kind(made)] = made
    names = [field.name for field in fields(made) if field.type in (bytes, "bytes")]  # type: ignore[arg-type]
    _PAYLOADS[made] = names[0] if names else ""
    return made


def encode_frame(message: Any, number: int = 0) -> list[bytes]:
    """The pieces of a message's frame, which are written one behind the other.

    Raises:
        TypeError: it is no message, or a field is of a type that cannot be sent.
        ValueError: it is larger than a frame may be.
    """
    cls, payload = type(message), b""
    if _KINDS.get(_kind(cls)) is not cls:
        raise TypeError(f"{cls.__name__} is not declared as a message")
    values = {field.name: getattr(message, field.name) for field in fields(cls)}
    if name := _payload_field(cls):
        payload = values.pop(name)
    header = json.dumps([_kind(cls), number, values], separators=(",", ":"), default=_encode).encode()
    if len(header) + len(payload) > _LARGEST:
        raise ValueError(f"a message {cls.__name__} is too large: {len(header)} + {len(payload)} bytes")
    pieces = [_PREFIX.pack(_MAGIC, len(header), len(payload)) + header]
    return [*pieces, payload] if payload else pieces


class FrameDecoder:
    """Turns a stream of bytes, cut anywhere, into messages.

    Args:
        largest_first: bytes that the first frame may have; few where it says who sends.
    """

    __slots__ = ("_buffer", "_largest", "_missing")

    def __init__(self, largest_first: int = _LARGEST) -> None:
        self._largest = largest_first
        self._buffer = bytearray()
        self._missing = 0

    def feed(self, data: bytes) -> list[Frame]:
        """The messages that `data` completes.

        Raises:
            ChannelCorrupt: the bytes are no frame of a known message; the decoder must not be fed again.
        """
        self._buffer += data
        # A large payload arrives in thousands of pieces; until it is complete there is nothing to look at.
        if len(self._buffer) < self._missing:
            return []
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= _PREFIX.size:
            header_start, payload_start, end = self._bounds(start)
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                header = bytes(view[header_start:payload_start])
                payload = bytes(view[payload_start:end])
            frames.append(_decode(header, payload))
            self._largest = _LARGEST
            start = end
        del self._buffer[:start]
        self._missing = self._bounds(0)[2] if len(self._buffer) >= _PREFIX.size else 0
        return frames

    def _bounds(self, start: int) -> tuple[int, int, int]:
        """Where header and payload of the frame at `start` begin, and where it ends."""
        magic, header_length, payload_length = _PREFIX.unpack_from(self._buffer, start)
        if magic != _MAGIC or header_length + payload_length > self._largest:
            raise ChannelCorrupt("the peer does not speak the protocol of this channel")
        payload_start = start + _PREFIX.size + header_length
        return start + _PREFIX.size, payload_start, payload_start + payload_length


def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encode(value: object) -> Any:
    """What JSON does not know by itself."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def _decode(header: bytes, payload: bytes) -> Frame:
    try:
        kind, number, values = json.loads(header)
        cls = _KINDS[kind]
        if name := _payload_field(cls):
            values[name] = payload
        return Frame(_build(cls, values), int(number))
    except KeyError as error:
        raise ChannelCorrupt(f"a message arrived that is not known here: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ChannelCorrupt(f"a frame arrived that is not of the form of a message: {error!s:.200}") from None


def _payload_field(cls: type[Any]) -> str:
    """The name of the field that travels as raw bytes; empty where there is none."""
    return _PAYLOADS[cls]


def _build(cls: type, values: dict[str, Any]) -> Any:
    converters = _converters(cls)
    if not values.keys() <= converters.keys():
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(values.keys() - converters.keys()))}")
    return cls(**{name: converters[name](value) for name, value in values.items()})


@cache
def _converters(cls: type) -> dict[str, Converter]:
    """For each field what checks its JSON value and turns it into what the annotation says."""
    hints = typing.get_type_hints(cls)
    return {field.name: _converter(hints[field.name], f"{cls.__name__}.{field.name}") for field in fields(cls)}


def _converter(hint: Any, place: str) -> Converter:
    if hint is Any:
        return lambda value: value
    if hint is Path:
        return Path
    if is_dataclass(hint):
        return lambda value: _build(typing.cast("type", hint), value)
    return _composed(hint, place) if typing.get_origin(hint) else _plain(hint, place)


def _plain(hint: Any, place: str) -> Converter:
    accepted = (int, float) if hint is float else (hint,)
    return _checked(lambda value: isinstance(value, accepted), place)


def _composed(hint: Any, place: str) -> Converter:
    """For `X | None`, `Literal`, sequences and mappings."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_converter(part, place) for part in arguments if part is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is typing.Literal:
        return _checked(lambda value: value in arguments, place)
    if origin in (list, tuple, Sequence):
        return _sequence(arguments[0], list if origin is list else tuple, place)
    inner = _converter(arguments[1], place)
    return lambda value: {str(key): inner(part) for key, part in value.items()}


def _sequence(hint: Any, made: type, place: str) -> Converter:
    if hint in (int, str):  # thousands of token ids: checked without a call for each

        def convert(value: Any) -> Any:
            if not set(map(type, value)) <= {hint}:
                raise TypeError(f"{place} holds something else than {hint.__name__}")
            return made(value)

        return convert
    inner = _converter(hint, place)
    return lambda value: made(inner(part) for part in value)


def _checked(is_right: Callable[[Any], bool], place: str) -> Converter:
    def convert(value: Any) -> Any:
        if not is_right(value):
            raise TypeError(f"{place} cannot be {value!r:.80}")
        return value

    return convert
