"""An evaluation that runs while the next batch is trained on: order, weights, and what a stop of the run leaves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import CheckpointSection, EvaluationSection
from areal_core.errors import RunError
from areal_core.training.checkpoint import restore_checkpoint
from areal_core.training.source import Interrupted
from tests.training.loop_parts import Parts, config, metrics, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")


def section(every: int = 2) -> EvaluationSection:
    return EvaluationSection.model_construct(every=every, at_start=False, keep_best=True)


def scores(folder: Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line.get("evaluation/reward")) for line in metrics(folder)]


def best(folder: Path) -> tuple[str, int]:
    """Return the number of batches that the best model was trained on, by its weights and by its score file."""
    return (folder / "best/weights").read_text(), json.loads((folder / "best/evaluation.json").read_text())["step"]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / f"attempts/1/checkpoints/step-{step:06d}"


def owed(folder: Path, step: int) -> dict[str, float] | None:
    found: dict[str, float] | None = json.loads((checkpoint(folder, step) / "trainer.json").read_text())["unevaluated"]
    return found


class Ends(Parts):
    """A source whose first evaluation ends with an error."""

    def __init__(self, error: Exception, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._error: Exception | None = error
        self.patience: list[float] = []

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        self.patience.append(patience_s)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return super().end_evaluation(patience_s)


def test_the_next_batch_is_trained_on_meanwhile_and_synced_afterwards(tmp_path: Path) -> None:
    parts = Parts()
    train(tmp_path, parts, config(3, evaluation=section()))
    order = [word for word in parts.asked if not word.startswith(("begin", "prepare"))]
    assert order == [
        "batch 0", "sync 1",
        "batch 1", "sync 2", "synced", "evaluate", "export best",
        "batch 2", "evaluated", "sync 3",
        "synced", "evaluate", "evaluated",  # of the last step: there is nothing to train on meanwhile
        "export model",
    ]  # fmt: skip
    assert scores(tmp_path) == [(1, None), (2, 0.5), (3, 0.5)]
    times = [line["time"] for line in metrics(tmp_path)]
    assert times == sorted(times)
    assert "time/evaluate_s" not in metrics(tmp_path)[1], "step 2 waited for nothing"
    assert {"time/evaluate_s", "time/export_s"} <= metrics(tmp_path)[2].keys()


def test_the_start_is_evaluated_beside_the_first_step(tmp_path: Path) -> None:
    parts = Parts()
    settings = section(every=5).model_copy(update={"at_start": True})
    train(tmp_path, parts, config(1, evaluation=settings))
    order = [word for word in parts.asked if word in ("evaluate", "batch 0", "evaluated", "sync 1")]
    assert order == ["evaluate", "batch 0", "evaluated", "sync 1", "evaluate", "evaluated"]
    assert scores(tmp_path) == [(0, 0.5), (1, 0.5)]


@pytest.mark.parametrize(
    ("measured", "kept"), [([0.1, 0.4, 0.3], 2), ([0.4, 0.1, 0.3], 1), ([0.1, 0.2, 0.3], 3), ([0.3, 0.3, 0.3], 1)]
)
def test_the_best_model_has_the_weights_that_were_measured(tmp_path: Path, measured: list[float], kept: int) -> None:
    parts = Parts()
    parts.scores = list(measured)
    train(tmp_path, parts, config(3, evaluation=section(every=1)))
    assert best(tmp_path) == (str(kept), kept)
    assert hidden(tmp_path) == []


def test_a_checkpoint_of_the_evaluated_step_owes_it(tmp_path: Path) -> None:
    """So a kill while the evaluation runs, or before the checkpoint of a later step, loses no score."""
    parts = Parts()
    parts.scores = [0.9, 0.1]
    settings = {"evaluation": section(), "checkpoint": CheckpointSection(every=1, keep=9)}
    train(tmp_path, parts, config(4, **settings))
    found = [owed(tmp_path, step) for step in range(1, 5)]
    assert [each is not None for each in found] == [False, True, False, False]
    again: Any = Parts()
    again.scores = [0.9, 0.1]
    again.trained = [[]] * 2
    state = restore_checkpoint(checkpoint(tmp_path, 2), {"actor": again})
    (tmp_path / ".best.new").mkdir()  # of the killed process
    assert train(tmp_path, again, config(4, **settings), state)
    order = [word for word in again.asked if word in ("evaluate", "batch 2", "evaluated", "sync 3")]
    assert order[:4] == ["evaluate", "batch 2", "evaluated", "sync 3"]
    assert scores(tmp_path) == [(1, None), (2, 0.9), (3, None), (4, 0.1)]
    assert metrics(tmp_path)[1]["time"] == found[1]["time"] if found[1] else False, "of the process that trained it"
    assert best(tmp_path) == ("2", 2)
    assert hidden(tmp_path) == []


def test_a_stop_before_the_next_batch_leaves_it_to_the_resume(tmp_path: Path) -> None:
    parts = Parts(interrupt_at=2)
    assert not train(tmp_path, parts, config(5, evaluation=section()))
    assert parts.committed == [(2, "step-000002")]
    assert owed(tmp_path, 2) is not None
    assert scores(tmp_path) == [(1, None)]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("error", [Interrupted(), RunError("the engine is lost")])
@pytest.mark.parametrize("every", [1, 2])
def test_what_ends_it_after_the_next_batch_was_trained_on_loses_no_step(
    tmp_path: Path, error: Exception, every: int
) -> None:
    """Its weights no longer exist, so it is given up with a log line. Steps and their metrics are kept."""
    parts, lines = Ends(error), list[str]()
    settings = config(5, evaluation=section(every))
    if isinstance(error, RunError):
        with pytest.raises(RunError, match="the engine is lost"):
            train(tmp_path, parts, settings, log=lines.append)
    else:
        assert not train(tmp_path, parts, settings, log=lines.append)
    step = every + 1
    assert lines == [f"the evaluation of step {every} was given up: step {step} has been trained already"]
    assert parts.patience == [15.0], "a run that was asked to stop gives it a moment"
    assert parts.committed == [(step, f"step-{step:06d}")]
    assert f"sync {step}" not in parts.asked
    assert hidden(tmp_path) == []
    again: Any = Parts()
    state = restore_checkpoint(checkpoint(tmp_path, step), {"actor": again})
    assert (state.unevaluated is not None) == (every == 1), "step 2 owes its own"
    assert train(tmp_path, again, config(4, evaluation=section(every)), state)
    expected = [(1, None), (2, 0.5), (3, 0.5), (4, 0.5)] if every == 1 else [(1, None), (2, None), (3, None), (4, 0.5)]
    assert scores(tmp_path) == expected


def test_where_it_cannot_go_on_beside_training_it_ends_first(tmp_path: Path) -> None:
    parts = Parts()
    train(tmp_path, parts, config(3, evaluation=section(), evaluates_beside_training=False))
    order = [word for word in parts.asked if word in ("batch 2", "evaluate", "evaluated", "sync 3", "export best")]
    assert order == ["evaluate", "evaluated", "export best", "batch 2", "sync 3", "evaluate", "evaluated"]
    assert {"time/evaluate_s", "evaluation/reward"} <= metrics(tmp_path)[1].keys()
