"""What users, their code and their machines do to a run: it says who, what and what now, and ends or goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
LONG = partial(pytest.param, marks=pytest.mark.long)
"""Cases that say little more than their siblings do."""

WORKFLOW = '''\
import os
import time

import torch

from areal_core.data import Episode, Trajectory


class Mine:
    """Single turns, and in row 3 something else."""

    async def run_episode(self, row, context):
        prompt = context.tokenizer.encode(row["prompt"])
        generation = await context.generate(prompt)
        episode = Episode([Trajectory.from_generation(prompt, generation)], 0.0, text="")
        if row["prompt"].startswith("1"):
            episode = misbehave(episode)
        episode.reward = float(len(generation.output_ids)) if episode.reward == 0.0 else episode.reward
        return episode


def misbehave(episode):
    {fault}
    return episode
'''


def faulty(workplace: Workplace, fault: str) -> list[str]:
    """The words of a run whose workflow misbehaves in some rows."""
    (workplace.folder / "mine.py").write_text(WORKFLOW.replace("{fault}", fault))
    return ["run", "run.yaml", "run_dir=run", "workflow=mine.py:Mine", "rewards=[]", "rollout.max_retries=0"]


def test_a_workflow_that_blocks_is_told_with_its_line_and_ends_the_run(workplace: Workplace) -> None:
    done = workplace.areal(*faulty(workplace, "time.sleep(10_000)"), "rollout.blocked_timeout_s=15")
    assert done.code == 1
    told = done.out + done.err
    assert "a call blocks everything else since 5 s" in done.out
    assert "mine.py" in told
    assert "time.sleep(10_000)" in told
    assert workplace.areal("audit", "run").code in (0, 1), "the ledger can be opened"
    assert not subprocess.run(["pgrep", "-f", str(workplace.folder / "run")], capture_output=True, check=False).stdout


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("episode.reward = float('nan')", "Episode.reward is nan"),
        LONG(
            "episode.trajectories[0].tokens['logprobs'].fill_(float('inf'))", "tokens['logprobs'] holds NaN or infinity"
        ),
        LONG("raise SystemExit(0)", "SystemExit: 0"),
        LONG("episode.trajectories[0].tokens['input_ids'].fill_(10**6)", "input_ids hold the token 1000000"),
    ],
)
def test_rows_that_always_fail_are_left_out_by_name_and_the_run_ends_well(
    workplace: Workplace, fault: str, told: str
) -> None:
    done = workplace.areal(*faulty(workplace, fault), "steps=3")
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert sum(line.get("groups/failed", 0) for line in lines) > 0
    assert all(line["train/skipped"] == 0 for line in lines)
    assert workplace.areal("audit", "run").code == 0
    stopped = workplace.areal(*faulty(workplace, fault), "run_dir=again", "rollout.max_consecutive_failures=1")
    assert stopped.code == 1
    assert told in stopped.err
    assert "data row" in stopped.err


@pytest.mark.parametrize("words", [LONG("=controller"), LONG("=trainer-0"), "areal_hf.server"])
def test_a_process_that_is_stopped_is_told_and_its_return_too(workplace: Workplace, words: str) -> None:
    """SIGSTOP and SIGCONT: said within seconds; the run goes on to its end as if nothing had been."""
    log = workplace.folder / "out"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*workplace.command, "run", "run.yaml", "run_dir=run", "steps=40"],
            cwd=workplace.folder, env=workplace.environment, stdout=out, stderr=out,
        )  # fmt: skip
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    (pid,) = workplace.processes(process, words)
    os.kill(pid, signal.SIGSTOP)
    workplace.wait_for(lambda: " since 1" in log.read_text(), process)
    os.kill(pid, signal.SIGCONT)
    assert process.wait(300) == 0, log.read_text()
    assert "is heard again" in log.read_text()
    assert workplace.areal("audit", "run").code == 0
