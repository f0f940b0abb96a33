"""Frames: what was encoded is decoded, however it is cut; anything else is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from areal_core.runtime.rpc import FrameDecoder, PeerCorrupt, encode_frame
from tests.runtime.parcels import Inner, Parcel, Small, parcel


def frame(body: object) -> bytes:
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return b"ARL3" + (len(data) + 8).to_bytes(4, "little") + data


SMALL = f"{Small.__module__}.Small"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"ARL3" + b"\x00" * 12,
        frame(b"\xc1"),
        frame([]),
        frame([0, "os.system", ["true"]]),
        frame([0, SMALL, [7]]),
        frame(["x", SMALL, ["a"]]),
        frame([1 << 63, SMALL, {"text": "a"}]),
        frame(b"\x91" * 200_000),
    ],
)
def test_garbage_is_refused(garbage):
    decoder = FrameDecoder()
    with pytest.raises(PeerCorrupt):
        decoder.feed(garbage)


def test_frames_may_be_cut_anywhere():
    messages = [parcel(1, b"abc"), Small(), parcel(2, b"\0" * 40)]
    stream = b"".join(bytes(encode_frame(m, 5)) for m in messages)
    for step in (1, 3, 17):
        decoder = FrameDecoder()
        frames = [f for i in range(0, len(stream), step) for f in decoder.feed(stream[i : i + step])]
        assert [f.message for f in frames] == messages
        assert {f.number for f in frames} == {5}


@pytest.mark.parametrize(
    "wrong",
    [
        Parcel("7", [], 0.0, None, Path(), {}),  # type: ignore[arg-type]
        Parcel(7, [1], 0.0, None, Path(), {}),  # type: ignore[list-item]
        Parcel(7, [], "x", None, Path(), {}),  # type: ignore[arg-type]
        Parcel(7, [], 0.0, Inner("a", (1, "b")), Path(), {}),  # type: ignore[arg-type]
    ],
)
def test_a_field_of_another_type_is_refused_by_the_receiver(wrong):
    with pytest.raises(PeerCorrupt):
        FrameDecoder().feed(bytes(encode_frame(wrong)))


def test_what_cannot_be_sent_is_said_to_the_sender():
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode_frame(Parcel(1, [], 0.0, None, Path(), {"value": object()}))
    with pytest.raises(TypeError, match="not declared"):
        encode_frame({"a": 1})
