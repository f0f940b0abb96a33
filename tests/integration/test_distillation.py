"""A model learns from a teacher what it says itself: two models, rollouts, and no reward."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from areal_testing.conformance.models import make_constant_model

if TYPE_CHECKING:
    from conftest import Workplace


@pytest.mark.slow
def test_the_distance_from_the_teacher_falls(workplace: Workplace) -> None:
    make_constant_model(workplace.folder / "teacher", 0)  # it is certain of one token, whatever came before
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "plugins=[finetuning,grpo,hf,fsdp]", "algorithm=finetuning/distill",
        "rewards=[finetuning/no_reward]", "roles.teacher.path=teacher", "steps=20", "rollout.group_size=1",
        "rollout.batch_size=32",
    )  # fmt: skip
    assert done.code == 0, done.err
    distances = [line["train/teacher_kl"] for line in workplace.metrics()]
    assert distances[0] > 30, distances
    assert sum(distances[-3:]) / 3 < 0.85 * distances[0], distances
    assert all(line["reward/mean"] == 0 for line in workplace.metrics())


@pytest.mark.slow
def test_a_model_is_its_own_teacher(workplace: Workplace) -> None:
    """The teacher's prompts go from the workers to two trainer processes, where an average of the weights has them."""
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "plugins=[finetuning,grpo,hf,fsdp]", "algorithm=finetuning/sdpo",
        "algorithm.group_filters=[{type: finetuning/teacher_prompts, success_reward: 0.1}]",
        "rewards=[parts.py:digits]",
        "workflow={type: finetuning/self_distillation, prompt_template: '{solution}{feedback}{prompt}'}",
        "algorithm.corrections=[]", "launcher.trainer_processes=2", "train_engine.learning_rate=1e-3",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert len(lines) == 4
    for line in lines:
        assert 0 < line["train/teacher_share"] <= 1, line
        assert line["train/advantage_largest"] > 1e-3, "another prompt gives other probabilities"
        # One update a batch: the policy is the proximal one, and A = log teacher - log policy.
        assert line["train/advantage_mean"] == pytest.approx(-line["train/teacher_kl"], rel=1e-3, abs=1e-4)
        assert line["train/skipped"] == 0


ROWS = "dataset={type: rewards/jsonl, paths: [rows.jsonl]}"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("takes", ["what it writes", "rows"])
def test_the_divergence_from_the_teacher_falls(workplace: Workplace, takes: str) -> None:
    """Over the whole vocabulary, with two trainer processes."""
    make_constant_model(workplace.folder / "teacher", 0)
    words = ["algorithm={type: finetuning/gkd, beta: 1}", "rewards=[finetuning/no_reward]", "rollout.group_size=1"]
    if takes == "rows":
        rows = [{"prompt": f"{number}+1=", "completion": f" {number + 1}"} for number in range(64)]
        (workplace.folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        words = ["algorithm={type: finetuning/gkd, beta: 1, example_tokenizer: conversations}", ROWS, "rewards=[]"]
        words += ["workflow=null", "inference_engine=null"]
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "plugins=[finetuning,grpo,hf,fsdp,rewards]", *words,
        "roles.teacher.path=teacher", "steps=12", "rollout.batch_size=32", "launcher.trainer_processes=2",
    )  # fmt: skip
    assert done.code == 0, done.err
    distances = [line["train/teacher_divergence"] for line in workplace.metrics()]
    assert distances[0] > 30, distances
    assert sum(distances[-3:]) / 3 < 0.9 * distances[0], distances
