"""The files of pictures that a row names: read, and opened, within limits that are told. Imports no torch."""

from __future__ import annotations

import io
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 64 << 20
"""Of a file; a picture that is larger is none that a model was trained on."""
PILLOWS_LIMIT = 178_956_970
"""Pixels from which on Pillow itself refuses a picture, as a bomb of a few bytes that fills the memory."""


class PictureFile(NamedTuple):
    """A file, and how errors call it."""

    name: str
    data: bytes


def files_of(value: Any, folder: Path) -> list[PictureFile]:
    """The files that a row names.

    Args:
        value: of the row's key: None, a path, base64 behind `data:`, bytes, `{bytes, path}`, or a list of these.
        folder: that paths are relative to.

    Raises:
        ValueError: it is nothing of the kind, or a file cannot be read; the file is named.
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        found = [file for each in value for file in files_of(each, folder)]
        return [PictureFile(f"{f.name} ({n} of {len(found)})", f.data) for n, f in enumerate(found, 1)]
    if isinstance(value, bytes):
        return [PictureFile("the picture", value)]
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        found = files_of(value.get("bytes") or value["path"], folder)
        return [PictureFile(f"the picture {value['path']}", found[0].data)] if value.get("path") and found else found
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return [PictureFile("the picture", b64decode(value.partition("base64,")[2], validate=True))]
        except ValueError as error:
            raise ValueError(f"a picture begins with {value[:40]!r} and is no base64: {error}") from None
    if isinstance(value, (str, Path)):
        path = folder / Path(value).expanduser()
        return [PictureFile(f"the picture {path}", _read(path))]
    raise ValueError(f"a picture is {type(value).__name__}; it must be a path, the bytes of a file, or {{bytes, path}}")


def open_picture(file: PictureFile, most_pixels: int = PILLOWS_LIMIT) -> Image:
    """A picture in RGB; its size is looked at before its pixels are.

    Raises:
        ValueError: it is empty, damaged or too large; the file is named.
    """
    from PIL import Image, UnidentifiedImageError

    if not file.data:
        raise ValueError(f"{file.name} is empty: mend the file, or take its row out of the data")
    try:
        opened = Image.open(io.BytesIO(file.data))
        pixels = opened.width * opened.height
        if pixels <= most_pixels:
            return opened.convert("RGB")
    except Exception as error:  # noqa: BLE001 - a damaged file may make the library raise anything
        is_other = isinstance(error, UnidentifiedImageError)
        told = "it is no picture, or its beginning is damaged" if is_other else f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.name} cannot be read: {told}: mend it, or take its row out of the data") from None
    raise ValueError(
        f"{file.name} has {opened.width} x {opened.height} pixels, and at most {most_pixels:,} are taken "
        "(workflow.max_picture_pixels): make it smaller, or raise that"
    )


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"the picture {path} is no file: name one")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"the picture {path} has more than {MOST_BYTES >> 20} MiB: make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the picture {path} cannot be read: {error}") from None
