import io

import pytest

from areal_vision.tiny_model import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model that sees."""
    return make_model(tmp_path_factory.mktemp("vision") / "model", seed=3)


@pytest.fixture(scope="session")
def image():
    """A function from a color and a size to the file of an image with an edge in it."""

    def make(color=(200, 30, 40), width=32, height=32):
        from PIL import Image

        image = Image.new("RGB", (width, height), (10, 10, 10))
        image.paste(color, (width // 3, 0, width, height // 2))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    return make
