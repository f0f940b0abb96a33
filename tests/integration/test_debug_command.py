"""`areal debug`: one row from prompt to loss in one process, where a breakpoint in a reward or a loss stops."""

from __future__ import annotations

import re
import subprocess

import pytest

pytestmark = pytest.mark.slow
PARTS = """\
def digits(completion):
    breakpoint()
    return sum(character.isdigit() for character in completion) / 8

def centered(batch):
    breakpoint()
    return batch["reward"] - batch["reward"].mean()

def loss(terms):
    breakpoint()
    return -terms.logprobs * terms.advantages, {"surprise": -terms.logprobs}
"""
ALGORITHM = "{type: policy_gradient, advantage: 'parts.py:centered', policy_loss: 'parts.py:loss'}"


def test_breakpoints_stop_in_reward_advantage_and_loss_and_tokens_are_shown(workplace):
    (workplace.folder / "parts.py").write_text(PARTS)
    words = ["debug", "run.yaml", "--row", "3", "rollout.group_size=2", f"algorithm={ALGORITHM}"]
    typed = "p 'reward of', completion\nc\n" * 2 + "p 'advantage of', len(batch)\nc\np 'loss of', terms.rows\nc\n"
    done = subprocess.run(
        [*workplace.command, *words],
        cwd=workplace.folder, env=workplace.environment, input=typed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("row 3: {'prompt': ")
    for told in ("('reward of', ", "('advantage of', 2)", "('loss of', 2)"):
        assert any(told in line for line in lines), told
    assert len([line for line in lines if "sample " in line and ": reward " in line]) == 2
    heading = lines.index(next(line for line in lines if line.startswith("sequence 0  reward ")))
    assert lines[heading + 1].split() == ["sampled", "advantage", "now"]
    assert lines[heading + 2].strip().startswith("'")
    token = lines[heading + 3].rsplit(maxsplit=3)
    assert abs(float(token[1]) - float(token[3])) < 1e-3, "on policy both are the same"
    assert any("surprise  " in line for line in lines)
    assert {path.name for path in workplace.folder.iterdir()} <= {
        "model",
        "run.yaml",
        "parts.py",
        "cache",
        "__pycache__",
    }


def test_what_a_reward_raises_is_shown_with_its_line(workplace):
    (workplace.folder / "parts.py").write_text(
        "from share import half\n\ndef digits(completion):\n    return half(0)\n"
    )
    (workplace.folder / "share.py").write_text("def half(total):\n    return 1 / total\n")
    done = workplace.areal("debug", "run.yaml")
    assert done.code == 1
    assert "your own code (--debug shows all):" in done.err
    told = "reward 'digits' raised ZeroDivisionError: division by zero (share.py:2, called from parts.py:4)"
    assert told in done.err
    assert "areal_core" not in done.err, "lines that are not the author's"
    whole = workplace.areal("debug", "run.yaml", "--debug").err
    assert "areal_core/rewards/scoring.py" in whole


def test_what_an_advantage_raises_is_shown_from_its_own_line_on(workplace):
    (workplace.folder / "parts.py").write_text(
        "def digits(completion): return 1.0\ndef centered(batch):\n    return batch['values']\n"
        "def loss(terms): return -terms.logprobs, {}\n"
    )
    done = workplace.areal("debug", "run.yaml", f"algorithm={ALGORITHM}")
    assert done.code == 1
    assert "composition.py" not in done.err
    assert "areal: error: KeyError: \"the batch has no key 'values'; it has [" in done.err
    assert 'parts.py", line 3, in centered' in done.err


@pytest.mark.parametrize(
    "stops", ["digits", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("centered", "loss"))]
)
def test_q_at_a_breakpoint_ends_quietly(workplace, stops):
    quiet = PARTS.replace("    breakpoint()\n", "")
    (workplace.folder / "parts.py").write_text(re.sub(rf"(def {stops}.*\n)", r"\1    breakpoint()\n", quiet))
    done = subprocess.run(
        [*workplace.command, "debug", "run.yaml", f"algorithm={ALGORITHM}"],
        cwd=workplace.folder, env=workplace.environment, input="q\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if line and "Loading weights" not in line] == []


@pytest.mark.nightly
def test_a_row_that_is_not_there_and_fine_tuning(workplace):
    done = workplace.areal("debug", "run.yaml", "--row", "1000000")
    assert done.code == 2
    assert "--row is 1000000, and grpo/additions has " in done.err
    (workplace.folder / "rows.jsonl").write_text('{"prompt": "1+2=", "completion": "3"}\n')
    words = "plugins: [fsdp, rewards, finetuning]\nsteps: 1\nmodel: {path: model}\nalgorithm: finetuning/sft\n"
    (workplace.folder / "sft.yaml").write_text(
        f"{words}dataset: {{type: rewards/jsonl, paths: [rows.jsonl]}}\ntrain_engine: fsdp\n"
    )
    done = workplace.areal("debug", "sft.yaml")
    assert done.code == 0, done.err
    assert "\n  '1+2='\n  '3' " in done.out
    assert "gradient_norm" in done.out


def test_a_workflow_is_closed_after_the_last_episode(workplace):
    """It may have started a server, which would keep the program from ending."""
    (workplace.folder / "parts.py").write_text(
        "from areal_core.data import Episode, Trajectory\n\n"
        "def digits(completion):\n    return 1.0\n\n"
        "class Workflow:\n"
        "    async def run_episode(self, row, context):\n"
        "        ids = context.tokenizer.encode(row['prompt'])\n"
        "        answer = await context.generate(ids, max_new_tokens=4)\n"
        "        return Episode([Trajectory.from_generation(ids, answer)], reward=1 / len(answer))\n\n"
        "    async def close(self):\n        print('the workflow is closed', flush=True)\n"
    )
    done = workplace.areal("debug", "run.yaml", "workflow=parts.py:Workflow", "rollout.group_size=2")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    closed = lines.index("the workflow is closed")
    assert any("sample 1: " in line for line in lines[:closed])
    assert any("update 0 of actor" in line for line in lines[closed:])
