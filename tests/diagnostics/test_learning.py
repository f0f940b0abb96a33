"""`areal doctor RUN`: each question finds its fault in the records of a run, and no other question does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.cli import main
from areal_core.diagnostics import examine
from areal_core.diagnostics.learning import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 40
NOISE = (0.01, -0.02, 0.015, -0.005)


def healthy(step: int) -> dict[str, Any]:
    """The metrics of a step of a run that learns."""
    share = step / STEPS
    return {
        "step": step,
        "reward/all_episodes": 0.2 + 0.6 * share + NOISE[step % 4],
        "reward/format": 0.5 + 0.2 * share,
        "reward/groups_all_equal": 0.2 + 0.3 * share,
        "batch/sequences": 64.0,
        "batch/sampled_tokens": 640.0,
        "batch/truncated": 0.02,
        "batch/response_length": 10.0,
        "staleness/mean": 0.5,
        "train/entropy": 0.8 - 0.4 * share,
        "train/gradient_norm": 1.0,
        "train/learning_rate": 1e-5,
        "train/clip_fraction": 0.05,
        "train/behavior_kl": 0.002,
        "train/behavior_difference": 0.01,
        "train/effective_sample_share": 0.95,
        "train/skipped": 0.0,
    }


def write(folder: Path, change: Callable[[int], dict[str, Any]] = lambda _: {}, steps: int = STEPS) -> Path:
    """Write the records of a run whose steps differ from those of a healthy one."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{**healthy(step), **change(step)} for step in range(1, steps + 1)]
    lines = [{key: value for key, value in line.items() if value is not None} for line in lines]
    text = "".join(f"{json.dumps(line)}\n" for line in [{"step": 0, "evaluation/reward": 0.2}, *lines])
    (folder / "metrics.jsonl").write_text(text)
    return folder


def wrong(folder: Path) -> dict[str, str]:
    return {answer.question: answer.text for answer in examine(folder) if answer.is_well is False}


def flat(step: int) -> dict[str, Any]:
    return {"reward/all_episodes": 0.2 + NOISE[step % 4]}


def test_a_run_that_learns_is_well(tmp_path: Path) -> None:
    answers = examine(write(tmp_path))
    assert [answer.question for answer in answers] == list(QUESTIONS)
    assert all(answer.is_well for answer in answers)
    assert "from 0.2" in answers[0].text
    assert "to 0.7" in answers[0].text


@pytest.mark.parametrize(
    ("change", "question", "words"),
    [
        pytest.param(flat, "does it learn", "within the noise", id="flat"),
        pytest.param(lambda s: {"reward/all_episodes": 0.8 - s / 100}, "does it learn", "to 0.4", id="falls"),
        pytest.param(
            lambda _: {"reward/groups_all_equal": 0.95}, "do the answers of a group differ in reward", "95%", id="equal"
        ),
        pytest.param(lambda _: {"reward/format": 0.0}, "does each reward vary", "format is always 0", id="constant"),
        pytest.param(lambda _: {"episodes/failed": 9.0}, "are episodes scored", "9 episodes", id="episodes"),
        pytest.param(lambda _: {"rewards/failed": 20.0}, "are episodes scored", "20 rewards", id="rewards"),
        pytest.param(
            lambda _: {"batch/truncated": 0.5}, "do answers end by themselves", "50% of the answers", id="cut"
        ),
        pytest.param(
            lambda _: {"train/behavior_kl": 0.1, "staleness/mean": 0.0},
            "do sampler and trainer agree",
            "compare number formats",
            id="engines",
        ),
        pytest.param(
            lambda _: {"train/behavior_kl": 0.1},
            "do sampler and trainer agree",
            "lower rollout.max_staleness",
            id="stale",
        ),
        pytest.param(lambda _: {"train/gradient_norm": 0.0}, "is there a gradient", "exactly 0 in 100%", id="zero"),
        pytest.param(lambda _: {"train/gradient_norm": 1e9}, "is there a gradient", "huge rewards", id="huge"),
        pytest.param(
            lambda _: {"train/skipped": 1.0, "train/gradient_norm": None}, "is there a gradient", "40 updates", id="nan"
        ),
        pytest.param(lambda _: {"train/learning_rate": 0.0}, "does the policy move", "nothing moves", id="no rate"),
        pytest.param(
            lambda _: {"staleness/tokens_over_bound": 600.0},
            "is the data fresh",
            "48% of them over the bound",
            id="over",
        ),
        pytest.param(
            lambda _: {"train/effective_sample_share": 0.1}, "is the data fresh", "worth 10% of fresh ones", id="worth"
        ),
    ],
)
def test_each_fault_is_found_by_its_question(
    tmp_path: Path, change: Callable[[int], dict[str, Any]], question: str, words: str
) -> None:
    found = wrong(write(tmp_path, change))
    assert list(found) == [question]
    assert words in found[question]


@pytest.mark.parametrize(
    ("change", "question", "words"),
    [
        pytest.param({"train/clip_fraction": 0.6}, "does clipping leave a gradient", "60% of the tokens", id="clipped"),
        pytest.param(
            {"train/entropy": 0.8, "train/clip_fraction": 0.0, "train/behavior_kl": 0.0},
            "does the policy move",
            "hardly moves",
            id="rate too small",
        ),
    ],
)
def test_some_faults_count_only_where_rewards_stand_still(
    tmp_path: Path, change: dict[str, Any], question: str, words: str
) -> None:
    assert not wrong(write(tmp_path / "rises", lambda _: change))
    found = wrong(write(tmp_path / "stands", lambda step: {**flat(step), **change}))
    assert list(found) == ["does it learn", question]
    assert words in found[question]


def test_a_policy_that_diverged_or_collapsed_is_named(tmp_path: Path) -> None:
    found = wrong(write(tmp_path / "a", lambda s: {"reward/all_episodes": 0.8 - s / 60, "train/entropy": 0.5 + s / 20}))
    assert "diverged" in found["does the policy explore"]
    found = wrong(write(tmp_path / "b", lambda s: {**flat(s), "train/entropy": 1.0 if s < 11 else 0.01}))
    assert "hardly samples" in found["does the policy explore"]
    found = wrong(write(tmp_path / "c", lambda s: {"reward/all_episodes": 0.2 if s < 11 else 0.0}))
    assert "rewards were 0.2 at first, and are all 0 now" in found["does the policy explore"]
    rare = wrong(write(tmp_path / "d", lambda s: {"reward/all_episodes": 0.01 if s < 3 else 0.0}))
    assert "does the policy explore" not in rare


def test_equal_rewards_say_which(tmp_path: Path) -> None:
    write(tmp_path, lambda _: {"reward/groups_all_equal": 0.95})

    def logged(*groups: list[float]) -> str:
        lines = [{"episodes": [{"reward": reward} for reward in group]} for group in groups]
        (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return wrong(tmp_path)["do the answers of a group differ in reward"]

    assert "mostly 0, as every logged answer" in logged([0.0, 0.0], [0.0, 0.0])
    assert "mostly 0: take easier prompts" in logged([0.0, 0.0], [0.0, 0.0], [0.0, 1.0])
    assert "mostly 1: the task is solved" in logged([1.0, 1.0], [1.0, 1.0], [0.0, 1.0])


def test_failures_of_a_few_early_steps_are_no_failures_of_the_run(tmp_path: Path) -> None:
    """A metric that counts is absent from the steps in which nothing happened."""
    assert not wrong(write(tmp_path, lambda step: {"episodes/failed": 60.0} if step == 3 else {}))


def test_noisy_rewards_that_rise_have_not_diverged(tmp_path: Path) -> None:
    noisy = {1: 0.3, 2: 0.01}
    found = wrong(
        write(tmp_path, lambda s: {"reward/all_episodes": noisy.get(s, 0.1 + s / 500), "train/entropy": 0.2 + s / 40})
    )
    assert "does the policy explore" not in found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308])
def test_metrics_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    found = wrong(write(tmp_path, lambda step: {"train/gradient_norm": value} if step > 30 else {}))
    assert "train/gradient_norm in 10; lower the learning rate" in found["are all metrics finite"]


def test_steps_count_once_and_in_their_order(tmp_path: Path) -> None:
    write(tmp_path)
    expected = examine(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*reversed(lines), lines[-1]]))
    assert examine(tmp_path) == expected


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"episodes": 5}', '{"episodes": [null]}', '{"episodes": [{"reward": "a"}]}']
)
def test_records_that_cannot_be_read_are_counted(tmp_path: Path, line: str) -> None:
    write(tmp_path)
    (tmp_path / "samples.jsonl").write_text(f'{{"episodes": [{{"reward": 1.0}}]}}\n{line}\n')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{line}\n{{"step": 99, "train/learning_rate": true, "train/gradient_norm": {10**400}}}\n')
    (answer,) = (answer for answer in examine(tmp_path) if answer.question == "are all records read")
    assert answer.text.startswith("2 lines of metrics.jsonl and samples.jsonl")


def test_a_short_run_is_not_judged_and_a_warm_up_is_named(tmp_path: Path) -> None:
    first = examine(write(tmp_path / "short", flat, steps=8))[0]
    assert (first.is_well, "10 steps are needed" in first.text) == (None, True)
    answers = {a.question: a for a in examine(write(tmp_path / "warm", lambda s: {"train/learning_rate": s * 1e-6}))}
    assert answers["does the policy move"].is_well is None
    assert "warmup_steps is not over" in answers["does the policy move"].text


def test_what_a_run_does_not_have_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0, "train/learning_rate": 1e-4}\n')
    assert [answer.question for answer in examine(tmp_path)] == ["does the policy move"]


def test_the_command_prints_the_answers_and_what_the_run_has_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, flat)
    (tmp_path / "diagnostics.jsonl").write_text('{"step": 3, "text": "most calls cannot be read"}\n')
    assert main(["doctor", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WRONG  does it learn: the mean reward went from 0.2")
    assert lines[-1] == "?      noted at step 3: most calls cannot be read"
    assert main(["doctor", "--json", str(write(tmp_path / "well"))]) == 0
    assert all(answer["is_well"] for answer in json.loads(capsys.readouterr().out))
    (tmp_path / "well" / "metrics.jsonl").write_text("")
    assert main(["doctor", str(tmp_path / "well")]) == 2
    assert "has finished no step" in capsys.readouterr().err
