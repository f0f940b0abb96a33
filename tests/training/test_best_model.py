"""The best model and its score: replaced together or not at all, and put right after a kill."""

from __future__ import annotations

import errno
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import CheckpointSection
from areal_core.disk import DiskError
from areal_core.interfaces import ACTOR
from areal_core.training.journal import Journal
from areal_core.training.learner import Learner
from areal_core.training.loop import Trainer

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("one_rank")


class Engine:
    """Exports its weights, a text."""

    forward = None

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(self.weights)


def trainer(run_dir: Path, weights: str = "", told: list[str] | None = None) -> Any:
    tell = (told if told is not None else []).append
    journal = Journal(run_dir / "metrics.jsonl", 0, phase=lambda _: nullcontext(), tell=tell)
    nothing: Any = None
    config: Any = SimpleNamespace(checkpoint=CheckpointSection())
    engine: Any = Engine(weights)
    learner = Learner(nothing, nothing, {"actor": ACTOR}, {"actor": engine})
    return Trainer(config, learner, None, run_dir, run_dir / "checkpoints", None, journal)


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def score(value: float) -> dict[str, float]:
    return {"step": 1, "evaluation/reward": value}


def best(weights: str, value: float) -> dict[str, str]:
    return {"best/weights": weights, "best/evaluation.json": json.dumps(score(value))}


def test_a_model_and_its_score_are_replaced_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(value: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer(tmp_path, "first")._export("best", score(0.2))
    trainer(tmp_path, "second")._export("best", score(0.4))
    assert files(tmp_path) == best("second", 0.4)
    with monkeypatch.context() as full:
        full.setattr("areal_core.training.loop.json.dumps", refuse)
        with pytest.raises(DiskError, match=r"the model of step 0 cannot be written to .*: the disk is full"):
            trainer(tmp_path, "third")._export("best", score(0.9))
    assert files(tmp_path) == best("second", 0.4)
    assert trainer(tmp_path)._best_score() == 0.4


@pytest.mark.parametrize("state", ["half written", "between the renames", "before the former one was removed"])
def test_what_a_kill_has_left_is_put_right(tmp_path: Path, state: str) -> None:
    trainer(tmp_path, "kept")._export("best", score(0.9))
    if state == "between the renames":
        (tmp_path / "best").rename(tmp_path / ".best.new")
    left = ".best.new" if state == "half written" else ".best.former"
    for name in (left, ".model.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("left")
    assert trainer(tmp_path)._best_score() == 0.9
    assert files(tmp_path) == best("kept", 0.9)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"evaluation/reward": null}'])
def test_a_score_that_cannot_be_read_is_told_and_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best/evaluation.json").write_text(text)
    told: list[str] = []
    assert trainer(tmp_path, told=told)._best_score() == -math.inf
    assert len(told) == 1
    assert "best/evaluation.json cannot be read and counts as none" in told[0]


def test_no_model_has_no_score(tmp_path: Path) -> None:
    told: list[str] = []
    assert trainer(tmp_path, told=told)._best_score() == -math.inf
    assert told == []
