"""The check of the code behind a config: what it finds, and when it may be left out."""

from __future__ import annotations

from contextlib import closing

import pytest

from areal_core.config import resolve
from areal_core.runs.checking import CodeCheck

pytestmark = pytest.mark.slow

PARTS = """\
def rows(): return []
class Rows:
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": "a", "completion": "b"}
class Engine:
    from areal_core.testing.fakes import FakeEngine
    capabilities = FakeEngine.capabilities
    def __init__(self, **settings): pass
"""
CONFIG = """\
steps: 1
model: {path: nowhere}
dataset: parts.py:Rows
train_engine: parts.py:Rows
algorithm: {type: policy_gradient, advantage: "parts.py:plain", policy_loss: "parts.py:loss"}
workflow: single_turn
inference_engine: parts.py:Engine
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """What a check finds with these parts, and whether it had to import anything."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CONFIG)

    def find(advantage: str) -> tuple[list[str], bool]:
        parts = tmp_path / "parts.py"
        text = f"{PARTS}\n{advantage}\ndef loss(terms): return terms.logprobs, {{}}\n"
        if not parts.is_file() or parts.read_text() != text:
            parts.write_text(text)
        with closing(CodeCheck(resolve(tmp_path / "run.yaml"))) as check:
            return check.problems(), check._process is not None

    return find


def test_what_is_right_is_imported_once_and_again_when_a_file_has_changed(problems, monkeypatch, tmp_path):
    right = "def plain(batch): return batch['reward']"
    assert problems(right) == ([], True)
    assert problems(right) == ([], False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problems(right) == ([], True), "modules may come from elsewhere now"
    assert problems(f"{right}  # changed") == ([], True)
    wrong, imported = problems("def plain(): return 1.0")
    assert imported
    assert ["is called with (batch)" in line for line in wrong] == [True]
    assert problems("def plain(): return 1.0")[1], "what was wrong is looked at again"


def test_a_check_that_dies_says_where(problems):
    ends = "import os, sys\nif sys.argv[0].endswith('checking.py'): os._exit(7)\n"
    (found,), _ = problems(f"{ends}def plain(batch): return batch['reward']")
    assert "ended with exit code 7" in found
