"""Read and open the image files that a row names, within size limits. This module does not import torch."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 64 << 20
"""Limit of an image file in bytes."""
PILLOW_LIMIT = 178_956_970
"""Pixels above which Pillow refuses an image: a small file may decompress to more than the memory holds."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation."""
_TURNS = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"),
    *("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
"""Pillow's operation that makes an image upright, for each orientation from 2 on."""


class ImageFile(NamedTuple):
    """Contents of an image file, and its name in errors."""

    name: str
    data: bytes


def files_of(value: Any, folder: Path) -> list[ImageFile]:
    """Return the image files that a row names.

    Args:
        value: value of the row: None, a path, base64 after `data:`, bytes, `{bytes, path}`, or a list of these.
        folder: folder that paths are relative to.

    Raises:
        ValueError: the value has another form, or a file cannot be read; the message names the file.
    """
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        files = [file for item in value for file in files_of(item, folder)]
        return [ImageFile(f"{f.name} ({n} of {len(files)})", f.data) for n, f in enumerate(files, 1)]
    if isinstance(value, bytes):
        return [ImageFile("the image", value)]
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        files = files_of(value.get("bytes") or value["path"], folder)
        return [ImageFile(f"the image {value['path']}", files[0].data)] if value.get("path") and files else files
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return [ImageFile("the image", b64decode(value.partition("base64,")[2], validate=True))]
        except ValueError as error:
            raise ValueError(f"an image starts with {value[:40]!r} but is not valid base64: {error}") from None
    if isinstance(value, str) and _ADDRESS.match(value):
        raise ValueError(
            f"the image {value[:200]} is a URL, which is not downloaded: download it before the run, and write its path"
        )
    if isinstance(value, (str, Path)):
        path = folder / Path(value).expanduser()
        return [ImageFile(f"the image {path}", _read(path))]
    raise ValueError(f"an image is {type(value).__name__}; it must be a path, the bytes of a file, or {{bytes, path}}")


def open_image(file: ImageFile, max_pixels: int = PILLOW_LIMIT) -> Image:
    """Return an image in RGB with 8 bits per color, upright, on white where it is transparent; of several frames the
    first.

    Args:
        file: the image file.
        max_pixels: limit of width x height.

    Raises:
        ValueError: the file is empty, damaged or too large, or has 32-bit values without a known range; the message
            names the file.
    """
    return _open(file, max_pixels)[0]


def shown_image(file: ImageFile, max_pixels: int = PILLOW_LIMIT) -> tuple[Image, bytes]:
    """Return an image as `open_image` does, and a file that every reader decodes to the same pixels.

    The file is the original one, or a PNG if the image was turned, flattened or converted.

    Raises:
        ValueError: see `open_image`.
    """
    image, is_changed = _open(file, max_pixels)
    if not is_changed:
        return image, file.data
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return image, png.getvalue()


def _open(file: ImageFile, max_pixels: int) -> tuple[Image, bool]:
    """Return an image as `open_image` does, and whether it was changed beyond a conversion to RGB.

    The size is checked before the pixels are decoded.
    """
    from PIL import Image, UnidentifiedImageError

    if not file.data:
        raise ValueError(f"{file.name} is empty: repair the file, or remove its row from the data")
    try:
        opened = Image.open(io.BytesIO(file.data))
        pixels = opened.width * opened.height
        if pixels <= max_pixels and opened.mode not in ("I", "F"):
            return _upright(opened)
    except Exception as error:  # noqa: BLE001 - Pillow may raise anything on a damaged file
        is_other = isinstance(error, UnidentifiedImageError)
        message = "it is not an image, or its header is damaged" if is_other else f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.name} cannot be read: {message}; repair it, or remove its row from the data") from None
    if pixels <= max_pixels:
        raise ValueError(
            f"{file.name} has 32-bit values (mode {opened.mode}) without a known range: save it with 8 or 16 bits per "
            "color, for example as PNG"
        )
    raise ValueError(
        f"{file.name} has {opened.width} x {opened.height} pixels; the limit is {max_pixels:,} "
        "(workflow.max_image_pixels): make the image smaller, or raise the limit"
    )


def _upright(opened: Image) -> tuple[Image, bool]:
    """Return what `_open` returns, for an image whose size has been checked."""
    from PIL import Image

    opened.load()  # turns a TIFF upright and removes its orientation tag
    is_animated = opened.format in ("GIF", "PNG", "WEBP") and getattr(opened, "n_frames", 1) > 1
    image, is_changed = opened, is_animated
    if opened.mode.startswith("I;16"):  # `convert` alone would clip all but the darkest values to white
        image, is_changed = opened.convert("I").point(lambda value: value / 256).convert("L"), True
    elif opened.has_transparency_data:
        clear = opened.convert("RGBA")
        if clear.getchannel("A").getextrema() != (255, 255):
            image, is_changed = Image.alpha_composite(Image.new("RGBA", opened.size, "white"), clear), True
    try:
        orientation = opened.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF data does not damage the image
        orientation = 1
    if orientation in range(2, 2 + len(_TURNS)):
        image, is_changed = image.transpose(Image.Transpose[_TURNS[orientation - 2]]), True
    return image.convert("RGB"), is_changed


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"the image {path} is not a file: write the path of a file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"the image {path} has more than {MAX_BYTES >> 20} MiB: make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error}") from None
