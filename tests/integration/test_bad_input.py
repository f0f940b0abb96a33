"""What is wrong is said in words that name the cause and the cure; nothing is left behind, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)
"""Cases that say little more than their siblings do."""

BAD_PARTS = """\
import os, time

TRIED = "The answer is 42."
def nan(completion): return float("nan") if completion != TRIED else 0.0
def text(completion): return "yes" if completion != TRIED else 0.0
def hangs(completion): return time.sleep(100) if completion != TRIED else 0.0
def dies(completion): return os._exit(3) if completion != TRIED else 0.0
def whole(completion): return int(completion)
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

class NeedsMore:
    def __init__(self, judge): ...

def two(batch, other): return batch["reward"]

class Nothing:
    async def run_episode(self, row, context): return None
"""


BROKEN_PLUGIN = """\
from areal_core.plugins import Component, hookimpl

@hookimpl
def areal_reward_functions():
    return [
        Component("no_target", "leads nowhere", target="broken_parts:nowhere"),
        Component("no_module", "needs a library", target="broken_parts.reward:needs"),
        Component("no_key", "lacks a key", target="broken_parts:bare", config="broken_parts.settings:Lengths"),
        Component("dies", "ends Python", target="broken_parts.dying:reward"),
    ]
"""
BROKEN_PARTS = {
    "__init__.py": "def bare(completion): return 1.0\n",
    "plugin.py": BROKEN_PLUGIN,
    "reward.py": "import a_library_that_is_missing\n",
    "dying.py": "import os\nos._exit(3)\n",
    "settings.py": "from areal_core.config import Settings\nclass Lengths(Settings):\n    free: int = 1\n",
}


def install_broken_plugin(workplace: Workplace) -> None:
    """A distribution `areal-broken` that is really installed, as far as Python can tell."""
    site = workplace.folder / "site"
    metadata = site / "areal_broken-1.dist-info"
    for folder in (metadata, site / "broken_parts"):
        folder.mkdir(parents=True)
    requires = "Requires-Dist: areal-core>=0.1\n"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areal-broken\nVersion: 1\n{requires}")
    (metadata / "entry_points.txt").write_text("[areal.plugins]\nbroken = broken_parts.plugin\n")
    for name, text in BROKEN_PARTS.items():
        (site / "broken_parts" / name).write_text(text)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    workplace.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@pytest.mark.parametrize(
    ("words", "cause", "cure"),
    [
        (["model.path=nowhere"], "there is no folder", "Hugging Face folder"),
        NIGHTLY(["model.path=empty_model"], "cannot be read", "config.json"),
        NIGHTLY(["dataset=bad_parts.py:Empty"], "is empty", "at least one row"),
        (["rollout.group_size=1"], "group_size is 1", "set rollout.group_size to 2 or more"),
        (["roles.reference.path=nowhere"], "know no such role", "roles of this algorithm: actor"),
        NIGHTLY(["sampling.max_new_tokens=256"], "no room for a prompt", "context of 256"),
        (["sampling.top_k=5"], "cannot reproduce", "allow_mismatched_sampling"),
        (["rollout.batch_size=6", "training.num_minibatches=4"], "does not divide", "choose one of"),
        NIGHTLY(["rewards.0.type=bad_parts.py:missing"], "has no 'missing'", "it has:"),
        NIGHTLY(["rewards.0.type=bad_parts.py:misnamed"], "rewards.0 needs golden_answer", "which in dataset are"),
        NIGHTLY(["rewards.0.type=bad_parts.py:whole"], "raised ValueError: invalid literal", "tried on row 0"),
        (["rollout.batchsize=3"], "unknown key", "batch_size"),
        (["--plugins", "gpro"], "gpro", "grpo"),
        NIGHTLY(["workflow=bad_parts.py:NeedsMore"], "needs judge", "give the parameter a default"),
        NIGHTLY(["algorithm.advantage=bad_parts.py:two"], "is called with (batch)", "missing a required argument"),
        NIGHTLY(["weight_sync.transport=broadcast"], "does not support with its current", "set it to memory or disk"),
        NIGHTLY(["inference_engine=sglang"], "SGLang is not installed beside areal", "areal_sglang[engine]'"),
        NIGHTLY(["inference_engine=vllm"], "vLLM is not installed beside areal", "or set program"),
        (["train_engine.max_tokens_per_microbatch=8"], "sequences may have 9 tokens", "raise it"),
        (["launcher.trainer_processes=99"], "99 ranks", "launcher.trainer_processes"),
        NIGHTLY(["rewards.0.type=broken/no_target"], "has no 'nowhere'", "mistake in the plugin"),
        NIGHTLY(["rewards.0.type=broken/no_module"], "'a_library_that_is_missing' is missing", "pip install"),
        NIGHTLY(["rewards.0.type=broken/no_key"], "does not fit its settings", "takes each setting by its name"),
        NIGHTLY(["rewards.0.type=broken/dies"], "ended with exit code 3", "importing rewards.0: broken/dies"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(workplace: Workplace, words: list[str], cause: str, cure: str) -> None:
    (workplace.folder / "bad_parts.py").write_text(BAD_PARTS)
    (workplace.folder / "empty_model").mkdir()
    install_broken_plugin(workplace)
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words)
    assert done.code == 2, done.out
    assert cause in done.err
    assert cure in done.err
    assert "Traceback" not in done.err
    assert not (workplace.folder / "run").exists()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        NIGHTLY(
            ["rewards.0.type=bad_parts.py:nan"], "reward 'nan' returned nan (float); it must return a finite number"
        ),
        NIGHTLY(["rewards.0.type=bad_parts.py:text"], "reward 'text' returned 'yes' (str)"),
        NIGHTLY(
            ["rewards.0.type=bad_parts.py:hangs", "rollout.reward_timeout_s=0.5"],
            "longer than rollout.reward_timeout_s",
        ),
        NIGHTLY(["rewards.0.type=bad_parts.py:dies"], "the reward process ended with exit code 3"),
        NIGHTLY(["workflow=bad_parts.py:Mismatched"], "keys of a trajectory differ in length"),
        (["workflow=bad_parts.py:Nothing"], "must return an Episode"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(workplace: Workplace, words: list[str], cause: str) -> None:
    (workplace.folder / "bad_parts.py").write_text(BAD_PARTS)
    done = workplace.areal("run", "run.yaml", "run_dir=run", "rollout.max_consecutive_failures=3", *words)
    assert done.code == 1, done.out
    assert cause in done.err
    assert "areal run --resume" in done.err
    assert "nothing was saved: fix the error and run again" in done.err
    assert done.err.splitlines()[-1].strip() in workplace.areal("status", "run").out, "it says the same"


@pytest.mark.parametrize("words", [(), NIGHTLY(("--json",))])
def test_a_plan_that_cannot_be_written_is_told_as_any_result_is(workplace: Workplace, words: tuple[str, ...]) -> None:
    """It was "nobody reads the output any more; the run continues", of a run that there is not, and 0."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*workplace.command, "run", "run.yaml", "--dry-run", *words],
            cwd=workplace.folder, env=workplace.environment, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False, timeout=600,
        )  # fmt: skip
    assert done.returncode == 1
    assert "the result cannot be written: No space left on device" in done.stderr
    assert "the run continues" not in done.stderr


@pytest.mark.nightly
def test_models_of_roles_and_rows_of_data_are_looked_at_before_a_run(workplace: Workplace) -> None:
    """Each would end the run after it has loaded its models; the data set has yet to be there in the right form."""
    rows = workplace.folder / "rows.jsonl"
    rows.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n\n{"chosen": "2"}\n')
    data = ["plugins=[grpo,finetuning,hf,fsdp,rewards]", "dataset={type: rewards/jsonl, paths: [rows.jsonl]}"]
    pairs = ["algorithm=finetuning/dpo", "rewards=[]", "workflow=null", "inference_engine=null"]
    done = workplace.areal("run", "run.yaml", "--dry-run", *data, *pairs, "roles.reference.path=missing")
    assert done.code == 2, done.out
    assert f"roles.reference.path: there is no folder {workplace.folder / 'missing'}" in done.err
    place = f"row 1 of the data set (counted from 0; {rows}:3) cannot be learned from: preferences need rows with"
    assert place in done.err
    rows.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert workplace.areal("run", "run.yaml", "--dry-run", *data, *pairs).code == 0
    rows.write_text('{"question": "1", "chosen": "2"}\n')
    done = workplace.areal("run", "run.yaml", "--dry-run", *data)
    assert f"row 0 of the data set (counted from 0; {rows}:1) has no 'prompt'; it has question, chosen" in done.err
    assert workplace.areal("run", "run.yaml", "--dry-run", *data, *pairs).code == 2, "a check of other rows was kept"


@pytest.mark.nightly
def test_a_row_that_is_skipped_as_too_long_is_not_lost(workplace: Workplace) -> None:
    """ShareGPT's column is enough for a file of conversations; the audit knows the row that the run skipped."""
    turns = [("human", "1+1="), ("gpt", "2")], [("human", "1" * 100), ("gpt", "2")]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in row]} for row in turns]
    (workplace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "plugins: [fsdp, rewards, finetuning]\nsteps: 2\nmodel: {path: model}\nrollout: {batch_size: 2}\n"
    words += "dataset: {type: rewards/jsonl, paths: [rows.jsonl]}\ntrain_engine: fsdp\nrun_dir: run\n"
    words += "algorithm: {type: finetuning/sft, example_tokenizer: {max_tokens: 32, overlong: skip}}\n"
    (workplace.folder / "sft.yaml").write_text(words)
    done = workplace.areal("run", "sft.yaml")
    assert done.code == 0, done.err
    assert [line["batch/skipped_rows"] for line in workplace.metrics()] == [1.0, 1.0]
    audit = workplace.areal("audit", "run")
    assert audit.code == 0, audit.out


def test_a_dry_run_prints_the_plan_and_starts_nothing(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "--dry-run")
    assert done.code == 0, done.err
    for words in ("4 prompts x 4 episodes = 16 sequences", "at most 1 (policy drop)", "memory", "1 x trainer"):
        assert words in done.out
    assert not (workplace.folder / "run").exists()


@pytest.mark.nightly
def test_what_only_takes_memory_may_be_changed_on_resume(workplace: Workplace) -> None:
    """A run that ran out of memory, or met a sequence that was too long, goes on with other settings."""
    (workplace.folder / "run").mkdir()
    text = workplace.areal("config", "show", "run.yaml").out
    (workplace.folder / "run" / "config.yaml").write_text(f"base_dir: {workplace.folder}\n{text}")
    (workplace.folder / "run" / "plugins.json").write_text("[]")
    words = ["train_engine.max_tokens_per_microbatch=512", "train_engine.activation_checkpointing=true"]
    done = workplace.areal("run", "--resume", "run", "--dry-run", "--allow-changes", *words)
    assert done.code == 0, done.err
    assert "changed on resume: train_engine.max_tokens_per_microbatch: 16384 -> 512" in done.out
    refused = workplace.areal("run", "--resume", "run", "--dry-run", "train_engine.epsilon=1e-7")
    assert refused.code == 2
