"""The files of images that a row names: read, and opened, within limits that are told. Imports no torch."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 64 << 20
"""Of a file; an image that is larger is none that a model was trained on."""
PILLOWS_LIMIT = 178_956_970
"""Pixels from which on Pillow itself refuses an image, as a bomb of a few bytes that fills the memory."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""
_TURNS = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"),
    *("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
"""What makes an image of each orientation, from 2 on, upright."""


class ImageFile(NamedTuple):
    """A file, and how errors call it."""

    name: str
    data: bytes


def files_of(value: Any, folder: Path) -> list[ImageFile]:
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
        return [ImageFile(f"{f.name} ({n} of {len(found)})", f.data) for n, f in enumerate(found, 1)]
    if isinstance(value, bytes):
        return [ImageFile("the image", value)]
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        found = files_of(value.get("bytes") or value["path"], folder)
        return [ImageFile(f"the image {value['path']}", found[0].data)] if value.get("path") and found else found
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return [ImageFile("the image", b64decode(value.partition("base64,")[2], validate=True))]
        except ValueError as error:
            raise ValueError(f"an image begins with {value[:40]!r} and is not a base64: {error}") from None
    if isinstance(value, str) and _ADDRESS.match(value):
        raise ValueError(
            f"the image {value[:200]} is an address, and addresses are not fetched: download it before the run, and "
            "name its path"
        )
    if isinstance(value, (str, Path)):
        path = folder / Path(value).expanduser()
        return [ImageFile(f"the image {path}", _read(path))]
    raise ValueError(f"an image is {type(value).__name__}; it must be a path, the bytes of a file, or {{bytes, path}}")


def open_image(file: ImageFile, most_pixels: int = PILLOWS_LIMIT) -> Image:
    """An image in RGB with 8 bits a color, upright, on white where it is transparent, of several frames the first.

    Raises:
        ValueError: it is empty, damaged or too large, or the range of its values is not known; the file is named.
    """
    return _open(file, most_pixels)[0]


def shown_image(file: ImageFile, most_pixels: int = PILLOWS_LIMIT) -> tuple[Image, bytes]:
    """An image, and a file of which every reader makes the same pixels: where it was changed, a PNG of what it is now.

    Raises:
        ValueError: see `open_image`.
    """
    image, is_changed = _open(file, most_pixels)
    if not is_changed:
        return image, file.data
    written = io.BytesIO()
    image.save(written, "PNG", compress_level=1)
    return image, written.getvalue()


def _open(file: ImageFile, most_pixels: int) -> tuple[Image, bool]:
    """An image as `open_image` gives it, and whether that is more than its pixels converted to RGB.

    Its size is looked at before its pixels are.
    """
    from PIL import Image, UnidentifiedImageError

    if not file.data:
        raise ValueError(f"{file.name} is empty: mend the file, or take its row out of the data")
    try:
        opened = Image.open(io.BytesIO(file.data))
        pixels = opened.width * opened.height
        if pixels <= most_pixels and opened.mode not in ("I", "F"):
            return _upright(opened)
    except Exception as error:  # noqa: BLE001 - a damaged file may make the library raise anything
        is_other = isinstance(error, UnidentifiedImageError)
        message = "it is not an image, or its beginning is damaged" if is_other else f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.name} cannot be read: {message}: mend it, or take its row out of the data") from None
    if pixels <= most_pixels:
        raise ValueError(
            f"{file.name} has values of 32 bits (mode {opened.mode}), of which nobody knows what is white: save it "
            "with 8 or 16 bits a color, such as a PNG"
        )
    raise ValueError(
        f"{file.name} has {opened.width} x {opened.height} pixels, and at most {most_pixels:,} are taken "
        "(workflow.max_image_pixels): make it smaller, or raise that"
    )


def _upright(opened: Image) -> tuple[Image, bool]:
    """What `_open` gives, of an image that may be unpacked."""
    from PIL import Image

    opened.load()  # which turns a TIFF, and takes its note away
    is_animated = opened.format in ("GIF", "PNG", "WEBP") and getattr(opened, "n_frames", 1) > 1
    image, is_changed = opened, is_animated
    if opened.mode.startswith("I;16"):  # converted as it is, all but the darkest values would be white
        image, is_changed = opened.convert("I").point(lambda value: value / 256).convert("L"), True
    elif opened.has_transparency_data:
        clear = opened.convert("RGBA")
        if clear.getchannel("A").getextrema() != (255, 255):
            image, is_changed = Image.alpha_composite(Image.new("RGBA", opened.size, "white"), clear), True
    try:
        orientation = opened.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged notes of a camera are no damage to its image
        orientation = 1
    if orientation in range(2, 2 + len(_TURNS)):
        image, is_changed = image.transpose(Image.Transpose[_TURNS[orientation - 2]]), True
    return image.convert("RGB"), is_changed


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"the image {path} is not a file: name one")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"the image {path} has more than {MOST_BYTES >> 20} MiB: make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error}") from None
