"""What is wrong is said in words that name the cause and the cure; nothing is left behind, and nothing hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

BAD_PARTS = """\
import os, time

def nan(completion): return float("nan")
def text(completion): return "yes"
def hangs(completion): time.sleep(100)
def dies(completion): os._exit(3)
def misnamed(completion, golden_answer): return 1.0

class Empty:
    def __len__(self): return 0
    def __getitem__(self, index): raise IndexError

class Mismatched:
    async def run_episode(self, row, context):
        from areal_core.data import Trajectory
        import torch
        zeros = torch.zeros(3)
        return Trajectory({"input_ids": zeros.long(), "loss_mask": zeros.bool(), "logprobs": torch.zeros(2),
                           "versions": zeros.int(), "turn_ids": zeros.int()})

class Nothing:
    async def run_episode(self, row, context): return None
"""


@pytest.mark.parametrize(
    ("words", "cause", "cure"),
    [
        (["model.path=nowhere"], "there is no folder", "Hugging Face folder"),
        (["model.path=empty_model"], "cannot be read", "config.json"),
        (["dataset=bad_parts.py:Empty"], "is empty", "at least one row"),
        (["rollout.group_size=1"], "group_size is 1", "set rollout.group_size to 2 or more"),
        (["algorithm.reference_kl.coefficient=0.1"], "no reference_model", "reference_model.path=PATH"),
        (["sampling.max_new_tokens=256"], "no room for a prompt", "context of 256"),
        (["sampling.top_k=5"], "cannot reproduce", "allow_mismatched_sampling"),
        (["rollout.batch_size=6", "training.updates_per_batch=4"], "does not divide", "choose one of"),
        (["rewards.0.type=bad_parts.py:missing"], "has no 'missing'", "it has:"),
        (["rollout.batchsize=3"], "unknown key", "batch_size"),
        (["--plugins", "gpro"], "gpro", "grpo"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(workplace: Workplace, words: list[str], cause: str, cure: str) -> None:
    (workplace.folder / "bad_parts.py").write_text(BAD_PARTS)
    (workplace.folder / "empty_model").mkdir()
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words)
    assert done.code == 2, done.out
    assert cause in done.err
    assert cure in done.err
    assert "Traceback" not in done.err
    assert not (workplace.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["rewards.0.type=bad_parts.py:nan"], "reward 'nan' returned nan (float); it must return a finite number"),
        (["rewards.0.type=bad_parts.py:text"], "reward 'text' returned 'yes' (str)"),
        (["rewards.0.type=bad_parts.py:hangs", "rollout.reward_timeout_s=0.5"], "longer than rollout.reward_timeout_s"),
        (["rewards.0.type=bad_parts.py:dies"], "the reward process ended with exit code 3"),
        (["rewards.0.type=bad_parts.py:misnamed"], "asks for 'golden_answer'"),
        (["workflow=bad_parts.py:Mismatched"], "keys of a trajectory differ in length"),
        (["workflow=bad_parts.py:Nothing"], "must return an Episode"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(workplace: Workplace, words: list[str], cause: str) -> None:
    (workplace.folder / "bad_parts.py").write_text(BAD_PARTS)
    done = workplace.areal("run", "run.yaml", "run_dir=run", "rollout.max_consecutive_failures=3", *words)
    assert done.code == 1, done.out
    assert cause in done.err
    assert "areal run --resume" in done.err


def test_a_dry_run_prints_the_plan_and_starts_nothing(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "--dry-run")
    assert done.code == 0, done.err
    for words in ("4 prompts x 4 episodes = 16 sequences", "at most 1 (policy drop)", "memory", "1 trainer rank"):
        assert words in done.out
    assert not (workplace.folder / "run").exists()
