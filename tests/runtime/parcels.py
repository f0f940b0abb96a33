"""Messages of the tests: one with a field of each kind, and a small one."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - annotations of messages are read at run time
from pathlib import Path
from typing import Any

from areal_core.runtime.rpc import Message


class Inner(Message):
    name: str
    shape: tuple[int, ...]


class Parcel(Message):
    number: int
    words: list[str]
    scale: float
    inner: Inner | None
    folder: Path
    extra: Mapping[str, Any]
    content: bytes = b""


class Small(Message):
    text: str = ""


def parcel(number: int, content: bytes = b"") -> Parcel:
    return Parcel(number, ["é", "b"], 0.5, Inner("x", (1, 2)), Path("/a/b"), {"k": [1, None, True]}, content)
