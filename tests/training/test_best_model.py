"""The best model and its score: replaced together or not at all, and repaired after a kill."""

from __future__ import annotations

import errno
import json
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.disk import DiskError
from areal_core.training.exports import Exports
from areal_core.training.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("one_rank")


class Engine:
    """An engine that exports its weights, a text."""

    forward = None

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(self.weights)


def exports(run_dir: Path, weights: str = "", lines: list[str] | None = None) -> tuple[Exports, Any]:
    """Return the exports of a run in a folder, and their engine."""
    log = (lines if lines is not None else []).append
    engine: Any = Engine(weights)
    return Exports(
        run_dir, engine, MetricsLogger(run_dir / "m.jsonl", 0, phase=lambda _: nullcontext(), log=log)
    ), engine


def write_best(run_dir: Path, weights: str, value: float) -> None:
    exports(run_dir, weights)[0].write_best(1, value)


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

    write_best(tmp_path, "first", 0.2)
    write_best(tmp_path, "second", 0.4)
    assert files(tmp_path) == best("second", 0.4)
    with monkeypatch.context() as full:
        full.setattr("areal_core.training.exports.json.dumps", refuse)
        with pytest.raises(DiskError, match=r"the model of step 1 cannot be written to .*: the disk is full"):
            write_best(tmp_path, "third", 0.9)
    assert files(tmp_path) == best("second", 0.4)
    assert exports(tmp_path)[0].settle() == 0.4


@pytest.mark.parametrize("state", ["half written", "between the renames", "before the former one was removed"])
def test_what_a_kill_has_left_is_put_right(tmp_path: Path, state: str) -> None:
    write_best(tmp_path, "kept", 0.9)
    if state == "between the renames":
        (tmp_path / "best").rename(tmp_path / ".best.new")
    left = ".best.new" if state == "half written" else ".best.former"
    for name in (left, ".model.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("left")
    assert exports(tmp_path)[0].settle() == 0.9
    assert files(tmp_path) == best("kept", 0.9)


def test_no_model_has_no_score(tmp_path: Path) -> None:
    lines: list[str] = []
    assert exports(tmp_path, lines=lines)[0].settle() == -math.inf
    assert lines == []
