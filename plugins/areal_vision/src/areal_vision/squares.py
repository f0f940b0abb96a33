"""Data set that needs both an image and a question: the color of a square, or its side."""

from __future__ import annotations

import io
import random
from base64 import b64encode
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_vision.config import SquaresSettings

SIDE = 32
"""Width and height of an image in pixels."""
COLORS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230), "white": (240, 240, 240)}
HELD_OUT = 64


class Squares:
    """A `Dataset` of rows `{prompt, image, answer}`. The image is a PNG file in base64.

    Args:
        settings: split and number of rows.
    """

    def __init__(self, settings: SquaresSettings) -> None:
        self._held_out = settings.split == "held_out"
        self._rows = HELD_OUT if self._held_out else settings.rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        draw = random.Random(f"{'held out' if self._held_out else 'train'} {index}")
        color, side = draw.choice(sorted(COLORS)), draw.choice(("left", "right"))
        asks_color = bool(index % 2)
        return {
            "prompt": "color?" if asks_color else "side?",
            "image": _image(COLORS[color], side, draw, held_out=self._held_out),
            "answer": color if asks_color else side,
        }


def _image(color: tuple[int, int, int], side: str, draw: random.Random, *, held_out: bool) -> str:
    """Return an image as base64. One fifth of the positions are held out; the others are for training."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), (16, 16, 16))
    while True:
        size = draw.randint(8, 12)
        left = draw.randint(0, SIDE // 2 - size) + (SIDE // 2 if side == "right" else 0)
        top = draw.randint(0, SIDE - size)
        if ((left + top) % 5 == 0) is held_out:
            break
    ImageDraw.Draw(image).rectangle((left, top, left + size - 1, top + size - 1), fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def first_letter(completion: str, answer: str) -> float:
    """Reward of 1 if the completion begins with the first letter of the right answer, else 0."""
    return float(completion[:1] == answer[0])
