import sys
from pathlib import Path

import pytest

pytest.importorskip("areal_vision", reason="the first-party plugins are not installed")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """A GPU computes convolutions of patches in TF32, which is further from transformers' than these tests allow."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model that sees."""
    from areal_vision.tiny_model import make_model

    return make_model(tmp_path_factory.mktemp("vision") / "model", seed=3)


@pytest.fixture(scope="session")
def image():
    from vision_rank_program import make_image

    return make_image
