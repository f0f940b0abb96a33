"""Rows that are longer than the model's context are found before a run, wherever in the data they are."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from areal_core.config import resolve
from areal_core.driver.checking import CodeCheck
from areal_core.driver.plan import make_plan
from areal_core.testing.conformance import make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PARTS = """\
class Rows:
    def __init__(self, long=(17,)): self.long = long
    def __len__(self): return 40
    def __getitem__(self, index):
        words = "word " * (9 if index in self.long else 1)
        return {"prompt": words, "completion": "word"}
class Engine:
    from areal_core.testing.fakes import FakeEngine
    capabilities = FakeEngine.capabilities
    def __init__(self, **settings): pass
def reward(completion): return 1.0
"""
CONFIG = """\
plugins: [finetuning, grpo]
steps: 1
model: {path: model}
dataset: parts.py:Rows
train_engine: parts.py:Engine
"""
TRAINS = {
    "fine-tuning": "algorithm: finetuning/sft\n",
    "rl": "algorithm: grpo\nworkflow: single_turn\nrewards: ['parts.py:reward']\ninference_engine: parts.py:Engine\n",
}
KEYS = {"fine-tuning": "algorithm.example_tokenizer.overlong", "rl": "workflow.overlong"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "word": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = make_model(tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 8
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", TRAINS)
def test_a_row_beyond_the_context_is_refused_or_counted(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(CONFIG + TRAINS[kind])

    def problems(*overrides: str) -> list[str]:
        with closing(CodeCheck(resolve(tmp_path / "run.yaml", overrides=overrides))) as check:
            return check.problems({})

    (told,) = problems()
    assert "17" in told
    assert KEYS[kind] in told
    resolved = resolve(tmp_path / "run.yaml", overrides=[f"{KEYS[kind]}=skip"])
    with closing(CodeCheck(resolved)) as check:
        (note,) = (note for note in make_plan(resolved, check, loads_model=False).notes if "too long" in note)
    assert note.startswith("dataset: 1 of the 40 rows that were checked are left out as too long")
    (told,) = problems(f"{KEYS[kind]}=skip", f"dataset={{type: '{tmp_path}/parts.py:Rows', long: {list(range(40))}}}")
    assert "all 40 rows that were checked are too long" in told
