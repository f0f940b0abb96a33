"""What is said of a run's metrics where something known goes wrong, and that nothing is said where all is well."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config import resolve
from areal_core.diagnostics import Watch, read_findings, write_notes
from areal_core.diagnostics.conditions import STEPS, Diagnostics

if TYPE_CHECKING:
    from pathlib import Path

WELL = {
    "reward/groups_all_equal": 0.3,
    "batch/truncated": 0.1,
    "train/entropy": 1.2,
    "train/learning_rate": 4e29,
    "train/behavior_kl": 0.001,
    "train/effective_sample_share": 0.95,
    "train/clip_fraction": 0.1,
    "train/gradient_norm": 5.0,
    "reward/all_episodes": 0.3,
    "reward/std": 0.4,
    "engine/waste": 0.1,
    "engine/peak_memory_share": 0.8,
    "train/critic/explained_variance": 0.2,
}


def said(*lines: dict[str, Any]) -> list[str]:
    """Everything that is said as these lines come, one after another."""
    diagnostics = Diagnostics()
    return [words for line in lines for words in diagnostics.add(line)]


def test_answers_of_one_token_are_not_too_short() -> None:
    line = {**WELL, "batch/truncated": 0.97, "batch/response_length": 1.0}
    assert said(*[line] * 3 * STEPS) == []
    assert "97% of the answers are cut" in said(*[{**line, "batch/response_length": 2.0}] * 3 * STEPS)[0]


@pytest.mark.parametrize(
    ("ill", "words"),
    [
        ({"reward/groups_all_equal": 1.0}, "all answers to a prompt earned the same"),
        ({"train/entropy": 4.0, "reward/all_episodes": 0.0}, "lower train_engine.learning_rate (now 4e+29)"),
        ({"batch/truncated": 0.5}, "50% of the answers are cut"),
        ({"train/entropy": 0.01, "reward/groups_all_equal": 0.7}, "fallen to 0.010 nats a token"),
        ({"train/behavior_kl": 0.3}, "a KL of 0.300 nats a token"),
        ({"train/behavior_kl": 0.04}, "a KL of 0.040 nats a token"),
        ({"train/effective_sample_share": 0.2}, "20% of the samples' worth"),
        ({"engine/waste": 0.4}, "40% of what the trainer's ranks could compute"),
        ({"engine/peak_memory_share": 0.95}, "held 95% of a GPU's memory"),
        ({"train/clip_fraction": 0.4}, "from 40% of the tokens"),
        ({"train/gradient_norm": 467_000.4}, "norm is 467,000: "),
        (
            {"agents/malformed_calls": 0.9, "agents/calls": 0.1},
            "most calls of tools cannot be read: 0.9 an episode",
        ),
    ],
)
def test_what_goes_wrong_is_said_once_with_what_to_try(ill: dict[str, float], words: str) -> None:
    sick = {**WELL, **ill}
    assert said(*[WELL] * STEPS, *[sick] * (STEPS - 1)) == [], "too early"
    (line,) = said(*[WELL] * STEPS, *[sick] * 3 * STEPS)
    assert words in line


def test_a_policy_that_has_learned_may_be_sure_of_itself() -> None:
    sure = {**WELL, "train/entropy": 0.01, "reward/groups_all_equal": 0.98}
    assert len(said(*[WELL] * STEPS, *[sure] * 3 * STEPS)) == 2
    assert said(*[WELL] * STEPS, *[{**sure, "reward/all_episodes": 0.95}] * 3 * STEPS) == []


def test_a_reward_that_is_the_same_for_everything_is_told() -> None:
    dead = {**WELL, "reward/groups_all_equal": 1.0, "reward/all_episodes": 0.0, "reward/std": 0.0}
    (line,) = said(*[dead] * 3 * STEPS)
    assert "in 100% of the groups" in line


def test_what_is_well_is_not_talked_about() -> None:
    assert said(*[WELL] * 50) == []
    assert said(*[{}] * 50) == []
    assert said(*[{"train/negative_log_likelihood": 2.0}] * 50) == []
    assert said(*[{**WELL, "agents/malformed_calls": 0.9, "agents/calls": 12.0}] * 20) == [], "a few of many calls"
    decided = {**WELL, "train/entropy": 0.01}
    assert said(*[WELL] * 20, *[decided] * 20) == [], "a policy that decides and still learns is well"


BLIND = {**WELL, "train/critic/explained_variance": -0.3}


def test_a_critic_that_explains_nothing_is_said_once() -> None:
    (line,) = said(*[WELL] * STEPS, *[{**BLIND, "reward/all_episodes": 0.35}] * 4 * STEPS)
    assert "raise roles.critic.learning_rate" in line
    assert len(said(*[WELL] * STEPS, *[WELL, *[BLIND] * 5] * STEPS)) == 1, "now and then it explains something"
    assert said(*[WELL, BLIND] * 4 * STEPS) == [], "half of the time it does"
    assert said(*[BLIND] * 7, *[WELL] * 20) == [], "at first it knows nothing"


@pytest.mark.parametrize("well", [{"reward/groups_all_equal": 0.7}, {"reward/all_episodes": 0.6}])
def test_a_critic_is_not_blamed_where_there_is_nothing_to_explain_or_the_reward_rises(well: dict[str, float]) -> None:
    """PPO's own preset learns with a critic that is worse than a mean: its answers are short, and luck decides."""
    assert said(*[WELL] * STEPS, *[{**BLIND, **well}] * 4 * STEPS) == []


def test_one_odd_step_is_nothing() -> None:
    assert said(*[WELL, WELL, {**WELL, "batch/truncated": 0.9}] * 20) == []


def test_a_metric_that_comes_late_begins_where_it_comes() -> None:
    """While a critic warms up the policy has no entropy; and the first steps are remembered when lines are not."""
    equal = {**WELL, "reward/groups_all_equal": 0.7}
    warm = [{"reward/groups_all_equal": 0.7}] * 2 * STEPS
    (line,) = said(*warm, *[equal] * STEPS, *[{**equal, "train/entropy": 0.01}] * STEPS)
    assert "fallen to 0.010" in line
    diagnostics, told = Diagnostics(), []
    for step in range(400):
        told += diagnostics.add({**WELL, "train/entropy": 2 * math.exp(-step / 50), "reward/groups_all_equal": 0.7})
    assert len(told) == 1


def test_one_step_without_a_gradient_is_enough() -> None:
    (line,) = said(WELL, {**WELL, "train/gradient_norm": 0.0}, WELL, {**WELL, "train/gradient_norm": 0.0})
    assert "the gradient was exactly 0, so nothing was learned in this step" in line
    assert "exactly 0" in said({"train/gradient_norm": 0.0})[0]


def test_a_finding_is_shown_and_kept_once_also_where_a_run_is_resumed(tmp_path: Path) -> None:
    config = resolve(None, ["grpo"]).config
    lines = [{"step": step, **WELL, "train/gradient_norm": 20_000.0} for step in range(1, 3 * STEPS)]
    write_notes(tmp_path, ["of the first start"])
    shown: list[str] = []
    for begins in (0, STEPS):
        watch = Watch(tmp_path, config, begins, shown.append, lines[:begins])
        for line in lines[begins:]:
            watch.add(line)
        write_notes(tmp_path, ["of the resume"])
    (words,) = shown
    assert words.startswith(f"step {STEPS}: the gradient's norm is 20,000")
    text = words.removeprefix(f"step {STEPS}: ")
    assert read_findings(tmp_path) == [{"step": 0, "text": "of the resume"}, {"step": STEPS, "text": text}]


def test_what_a_discarded_history_showed_is_forgotten_and_shown_again(tmp_path: Path) -> None:
    config, shown = resolve(None, ["grpo"]).config, list[str]()
    for _ in range(2):
        Watch(tmp_path, config, 2, shown.append).add({"step": 3, "train/gradient_norm": 0.0})
    assert len(shown) == 2
    assert [line["step"] for line in read_findings(tmp_path)] == [3]


def test_a_condition_that_fails_is_logged_once_and_ends_no_training(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "train/gradient_norm": "high"} for step in (1, 2)]
    shown: list[str] = []
    watch = Watch(tmp_path, resolve(None, ["grpo"]).config, 0, shown.append)
    for line in lines:
        watch.add(line)
    (words,) = shown
    assert words.startswith("step 1: the diagnostics of the metrics failed: TypeError(")
