"""The demonstration's model is made whole, once, whoever was killed while making it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, ClassVar

import pytest

from areal_core.interfaces import FindsModel
from areal_core.testing.conformance import ModelSourceSuite

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestAdditionModel(ModelSourceSuite):
    component = "grpo/addition_model"
    settings: ClassVar = {"steps": 2}
    interrupted_after = (2, 9)  # in the first model; in the run that fine-tunes it

    @pytest.fixture(autouse=True)
    def _one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def test_a_cache_that_was_copied_has_the_model(self, tmp_path: Path) -> None:
        """It is known by what it was made of: neither where the cache lies nor who asks is part of that."""
        source, copied = self.make(), tmp_path / "copied"
        assert isinstance(source, FindsModel)
        assert source.find(tmp_path / "cache") is None
        made = source.prepare(tmp_path / "cache")
        shutil.copytree(tmp_path / "cache", copied)
        assert self.make().find(copied) == copied / made.relative_to(tmp_path / "cache")
        (copied / made.relative_to(tmp_path / "cache") / "config.json").unlink()
        assert self.make().find(copied) is None
