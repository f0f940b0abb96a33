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
NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)
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


ONCE = "os.path.exists('done') or (open('done', 'w').close(), {fault})"
"""In the first row that misbehaves, and in no other."""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("time.sleep(10_000)", "a call has blocked this process for 15 s"),
        NIGHTLY("os.kill(os.getpid(), 9)", "worker-0 was killed by SIGKILL"),
        NIGHTLY("os._exit(0)", "worker-0 ended with exit code 0"),
    ],
)
def test_a_workflow_that_blocks_or_dies_costs_its_episodes_and_nothing_else(
    workplace: Workplace, fault: str, message: str
) -> None:
    words = faulty(workplace, ONCE.replace("{fault}", fault))
    done = workplace.areal(*words, "rollout.blocked_timeout_s=15")
    assert done.code == 0, done.err
    assert message in done.out
    assert "it is restarted" in done.out
    if "sleep" in fault:
        assert "a call has blocked this process for 5 s" in done.out
        assert "mine.py" in done.out
    assert len(workplace.metrics()) == 4
    assert workplace.areal("audit", "run").code == 0
    assert not subprocess.run(["pgrep", "-f", str(workplace.folder / "run")], capture_output=True, check=False).stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        NIGHTLY("hog = bytearray(1 << 34)", "failed: MemoryError"),
        NIGHTLY("__import__('ctypes').memset(0, 1, 1)", "worker-0 was killed by SIGSEGV"),
    ],
)
def test_what_takes_all_memory_costs_its_episode(workplace: Workplace, fault: str, message: str) -> None:
    words = faulty(workplace, ONCE.replace("{fault}", f"exec({fault!r})"))
    done = workplace.areal(*words, "rollout.worker_memory_gib=4")
    assert done.code == 0, done.err
    assert message in done.out
    assert len(workplace.metrics()) == 4
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_a_workflow_that_ends_every_worker_ends_the_run(workplace: Workplace) -> None:
    words = faulty(workplace, "os._exit(3)")
    program = workplace.folder / "mine.py"
    program.write_text(program.read_text().replace('row["prompt"].startswith("1")', "True"))
    done = workplace.areal(*words)
    assert done.code == 1, done.out
    assert "8 rollout workers were lost one after another, and no group ended in between" in done.err
    assert "ended with exit code 3" in done.out


@pytest.mark.nightly
def test_a_prompt_that_ends_every_worker_fails_and_the_run_goes_on(workplace: Workplace) -> None:
    done = workplace.areal(*faulty(workplace, "os._exit(0)"), "rollout.workers=2", "steps=20")
    assert done.code == 0, done.err
    assert "4 rollout workers were lost with this prompt" in done.out
    assert sum(line.get("groups/failed", 0) for line in workplace.metrics()) > 0
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("episode.reward = float('nan')", "Episode.reward is nan"),
        NIGHTLY(
            "episode.trajectories[0].tokens['logprobs'].fill(float('inf'))", "tokens['logprobs'] holds NaN or infinity"
        ),
        NIGHTLY("raise SystemExit(0)", "SystemExit: 0"),
        NIGHTLY("episode.trajectories[0].tokens['input_ids'].fill(10**6)", "input_ids hold the token 1000000"),
    ],
)
def test_rows_that_always_fail_are_left_out_by_name_and_the_run_ends_well(
    workplace: Workplace, fault: str, message: str
) -> None:
    done = workplace.areal(*faulty(workplace, fault), "steps=3")
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert sum(line.get("groups/failed", 0) for line in lines) > 0
    assert all(line["train/skipped"] == 0 for line in lines)
    assert workplace.areal("audit", "run").code == 0
    stopped = workplace.areal(*faulty(workplace, fault), "run_dir=again", "rollout.max_consecutive_failures=1")
    assert stopped.code == 1
    assert message in stopped.err
    assert "data row" in stopped.err


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["controller", "trainer-0", "worker-0", "server-0"])
def test_a_process_that_is_stopped_is_told_and_its_return_too(workplace: Workplace, words: str) -> None:
    """SIGSTOP and SIGCONT: said within seconds; the run goes on to its end as if nothing had been."""
    log = workplace.folder / "out"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*workplace.command, "run", "run.yaml", "run_dir=run", "steps=40"],
            cwd=workplace.folder, env=workplace.environment, stdout=out, stderr=out,
        )  # fmt: skip
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    pid = workplace.pid(words)
    os.kill(pid, signal.SIGSTOP)
    workplace.wait_for(lambda: " s (phase " in log.read_text(), process)
    os.kill(pid, signal.SIGCONT)
    assert process.wait(300) == 0, log.read_text()
    assert "responds again" in log.read_text()
    assert workplace.areal("audit", "run").code == 0
