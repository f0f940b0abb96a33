"""Rows that are longer than the model's context are found before a run, wherever in the data they are."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.checks.preflight import preflight
from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.runtime.folder import RunFolder
from areal_testing.conformance import make_model

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.checks.preflight import Preflight

pytestmark = pytest.mark.slow

PARTS = """\
class Rows:
    def __init__(self, long=(17,)): self.long = long
    def __len__(self): return 40
    def __getitem__(self, index):
        words = "word " * (9 if index in self.long else 1)
        return {"prompt": words, "completion": "word"}
class Engine:
    from areal_testing.fakes import FakeEngine
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


@pytest.mark.parametrize("kind", ["rl", pytest.param("fine-tuning", marks=pytest.mark.nightly)])
def test_a_row_beyond_the_context_is_refused_or_counted(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(CONFIG + TRAINS[kind])

    def check(*overrides: str) -> Preflight:
        resolved = resolve(tmp_path / "run.yaml", overrides=["sampling.max_new_tokens=4", *overrides])
        return preflight(resolved, RunFolder(tmp_path / "run"), [], starts=False)

    with pytest.raises(ConfigError) as refusal:
        check()
    (problem,) = refusal.value.problems
    assert problem.startswith("dataset: row 17 of the data set (counted from 0) ")
    assert KEYS[kind] in problem
    (note,) = (note for note in check(f"{KEYS[kind]}=skip").notes if "too long" in note)
    assert note.startswith("dataset: 1 of the 40 rows that were checked are left out as too long")
    with pytest.raises(ConfigError) as refusal:
        check(f"{KEYS[kind]}=skip", f"dataset={{type: '{tmp_path}/parts.py:Rows', long: {list(range(40))}}}")
    assert refusal.value.problems == ("dataset: all 40 rows that were checked are too long: see overlong",)


SOURCE = """\
class Source:
    def prepare(self, cache):
        from pathlib import Path
        return Path(__file__).parent / "model"
"""


@pytest.mark.usefixtures("model")
def test_it_is_found_before_the_first_step_where_the_run_makes_its_model(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS + SOURCE)
    text = CONFIG.replace("{path: model}", f"{{source: '{tmp_path}/parts.py:Source'}}") + TRAINS["fine-tuning"]
    (tmp_path / "run.yaml").write_text(
        text.replace("parts.py:Engine", "fsdp").replace("[finetuning", "[fsdp, finetuning")
    )
    command = [sys.executable, "-m", "areal_core", "run", str(tmp_path / "run.yaml"), f"run_dir={tmp_path}/run"]
    environment = {**os.environ, "AREAL_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 1, told
    assert "row 17" in told
    assert not (tmp_path / "run/logs/trainer-0.log").exists(), "nothing else has started"
