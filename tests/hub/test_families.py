"""A new user's first run of another model: `model.path` names it on the hub, and nothing else of the config changes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from tests.hub.test_runs import SMALL
from tests.models import small_models

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hub.conftest import AtHub
    from tests.hub.local_hub import LocalHub

FAMILIES = {
    "qwen3_5_text": "mixers",
    "cohere": "packed",
    "deepseek_v3": "packed",
    "gemma2": "rows",
    "gpt_oss": "packed",
    "granitemoehybrid": "mixers",
    "jamba": "mixers",
    "lfm2": "packed",
    "llama4_text": "rows",
    "mamba2": "mixers",
}
"""How each is trained."""
TRIED_OFTEN = ("qwen3_5_text",)
"""The nightly tests try all families."""
CONTEXT = 512
MOST = 0.001
"""By how much a log-probability may differ between the engines, in float32."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.nightly] * (family not in TRIED_OFTEN)) for family in FAMILIES]
)
def test_a_run_of_a_model_from_the_hub(family: str, at_hub: AtHub, hub: LocalHub, model_on_hub: Path) -> None:
    folder = at_hub.folder / "published"
    tokenizer = AutoTokenizer.from_pretrained(model_on_hub)
    longer = {"max_position_embeddings": CONTEXT} if "max_position_embeddings" in small_models.FAMILIES[family] else {}
    small_models.make_model(family, folder, vocab_size=len(tokenizer), **longer)
    tokenizer.save_pretrained(folder)
    hub.add("models", f"tiny/{family}", folder)
    shutil.rmtree(folder)
    outcome = at_hub.areal("run", "gsm8k.yaml", *SMALL, "run_dir=run", f"model.path=tiny/{family}")
    assert outcome.code == 0, outcome.err
    steps = [line for line in at_hub.metrics() if line["step"]]  # step 0 is the first evaluation
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["train/behavior_difference"] < MOST for line in steps)
    assert (at_hub.folder / "run" / "model" / "config.json").is_file()
    logs = "".join(path.read_text() for path in (at_hub.folder / "run" / "logs").glob("trainer*.log"))
    how = {"packed": "", "mixers": "mixers compute them in rows", "rows": "each sequence is a padded row"}
    assert how[FAMILIES[family]] in logs
