"""The demonstration's model is made whole, once, whoever was killed while making it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_core.config import resolve
from areal_core.engines import ModelResolver
from areal_grpo.demonstration.model import make_model
from areal_testing.conformance import ModelSourceSuite

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.nightly
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
        assert isinstance(source, ModelResolver)
        assert source.find(tmp_path / "cache") is None
        made = source.prepare(tmp_path / "cache")
        shutil.copytree(tmp_path / "cache", copied)
        assert self.make().find(copied) == copied / made.relative_to(tmp_path / "cache")
        (copied / made.relative_to(tmp_path / "cache") / "config.json").unlink()
        assert self.make().find(copied) is None


LESSONS = """
class Lessons:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"prompt": "1+1=", "completion": "2"}
"""


def taught(folder: Path, **settings: object) -> Any:
    """The source that a config beside lessons names."""
    source = {"type": "grpo/taught_model", "lessons": "lessons.py:Lessons", **settings}
    model = json.dumps({"source": source})
    (folder / "run.yaml").write_text(f"plugins: [grpo, hf, fsdp]\npreset: grpo/addition\nmodel: {model}\n")
    resolved = resolve(str(folder / "run.yaml"), [], [], environment={})
    return resolved.config.model.source.build()


def test_a_taught_model_is_known_by_what_its_lessons_say_and_not_by_where_they_lie(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    keys = []
    for place, text in (("a", LESSONS), ("b", LESSONS), ("c", LESSONS.replace("2", "3"))):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "lessons.py").write_text(text)
        keys += [taught(folder, steps=2)._key(), taught(folder, steps=2, phrases=["<call>"])._key()]
        assert taught(folder).find(cache) is None
    assert keys[:2] == keys[2:4], "a copy of the file is the same"
    assert len(set(keys)) == 4, "other lessons or phrases are another model"


def test_a_phrase_is_one_token_and_no_special_one(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    phrase = '<tool_call>{"name": "f"}'
    folder = make_model(tmp_path / "model", hidden=32, layers=1, heads=2, phrases=[phrase])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(f"1{phrase}2")
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"1{phrase}2"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(tokenizer)
