"""A hook stops the run, or adds metrics: what the loop then does, on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import CheckpointSection, EvaluationSection
from areal_core.training.state import TrainerState
from tests.training.loop_parts import Parts, config, metrics, train

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")


class Stops:
    """Hooks that stop the run from a step on, and add metrics."""

    are_awaited = True

    def __init__(self, step: int, added: Mapping[str, float] | None = None) -> None:
        self.asked: list[tuple[int, dict[str, float]]] = []
        self._step = step
        self._added = added or {}

    def add_metrics(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return self._added

    def should_stop(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> str:
        self.asked.append((step, dict(metrics)))
        return "enough" if step >= self._step else ""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_a_hook_stops_ends_like_one_that_is_done(tmp_path: Path, every: int) -> None:
    parts, notes = Parts(), list[tuple[int, str]]()
    settings = config(9, checkpoint=CheckpointSection(every=every))
    hooks = Stops(2, {"guard/x": 7.0, "reward/mean": -9.0, "step": 99.0})
    assert train(tmp_path, parts, settings, hooks=[hooks], on_note=lambda *note: notes.append(note))
    assert parts.trained == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts.committed[-1] == (2, "step-000002")
    assert parts.asked[-1] == "export model"
    assert notes == [(2, "the run stopped before its last step: enough")]
    assert [(line["step"], line["guard/x"], line["reward/mean"]) for line in metrics(tmp_path)] == [
        (1, 7.0, 0.5), (2, 7.0, 0.5),
    ]  # fmt: skip
    assert [step for step, _ in hooks.asked] == [1, 2]
    assert hooks.asked[0][1]["guard/x"] == 7.0


def test_a_stop_at_the_last_step_is_no_stop(tmp_path: Path) -> None:
    notes: list[tuple[int, str]] = []
    assert train(tmp_path, Parts(), config(2), hooks=[Stops(9)], on_note=lambda *note: notes.append(note))
    assert notes == []


def test_a_resumed_run_continues_where_a_hook_stopped_it(tmp_path: Path) -> None:
    parts = Parts()
    train(tmp_path, parts, config(4), hooks=[Stops(2)])
    assert train(tmp_path, parts, config(4), TrainerState(step=2, first=2))
    assert parts.trained[2:] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("beside", "steps", "evaluations"), [(False, 2, 2), (True, 3, 2)])
def test_a_hook_sees_a_step_with_its_evaluation(tmp_path: Path, beside: bool, steps: int, evaluations: int) -> None:
    """Beside training, the evaluation of step 2 ends while step 3 is trained, and the run stops after that."""
    parts = Parts()
    evaluation = EvaluationSection.model_construct(every=2, at_start=True, keep_best=False)
    settings = config(9, evaluation=evaluation, evaluates_beside_training=beside)
    hooks = Stops(2)
    assert train(tmp_path, parts, settings, hooks=[hooks])
    assert len(parts.trained) == steps
    assert parts.committed == [(steps, f"step-{steps:06}")]
    assert parts.asked.count("evaluated") == evaluations
    seen = dict(hooks.asked)
    assert [step for step in seen if "evaluation/reward" in seen[step]] == [0, 2]
    assert [line["step"] for line in metrics(tmp_path)] == [*range(steps + 1)]


def test_a_stop_before_the_first_step_trains_nothing(tmp_path: Path) -> None:
    parts = Parts()
    evaluation = EvaluationSection.model_construct(every=2, at_start=True, keep_best=False)
    assert train(tmp_path, parts, config(9, evaluation=evaluation, evaluates_beside_training=False), hooks=[Stops(0)])
    assert parts.trained == []
    assert parts.committed == [(0, "step-000000")]


def test_an_evaluation_that_is_due_when_a_hook_stops_the_run_is_still_made(tmp_path: Path) -> None:
    """Beside training, step 2 stops the run after step 3, which is to be evaluated too."""
    parts = Parts()
    evaluation = EvaluationSection.model_construct(every=1, at_start=False, keep_best=False)
    assert train(tmp_path, parts, config(9, evaluation=evaluation), hooks=[Stops(2)])
    assert len(parts.trained) == 3
    assert [line["step"] for line in metrics(tmp_path) if "evaluation/reward" in line] == [1, 2, 3]
