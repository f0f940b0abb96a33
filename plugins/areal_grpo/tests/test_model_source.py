"""The demonstration's model is made whole, once, whoever was killed while making it."""

from __future__ import annotations

from typing import ClassVar

import pytest

from areal_core.testing.conformance import ModelSourceSuite


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestAdditionModel(ModelSourceSuite):
    component = "grpo/addition_model"
    settings: ClassVar = {"steps": 2}
    interrupted_after = (2, 9)  # in the first model; in the run that fine-tunes it

    @pytest.fixture(autouse=True)
    def _one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
