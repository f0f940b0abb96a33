"""A pool with true worker processes, whose rewards fork and leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.rewards.child import RewardProcess
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.scoring import RewardError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HANG_S = 120.0
PROGRAM = """
import asyncio, os, socket, sys, time
from pathlib import Path
from types import SimpleNamespace
from areal_core.rewards import worker
from areal_core.rewards.scoring import RewardSum, WeightedReward

def odd(completion):
    if completion == "forks":
        os.fork()
    if completion == "leaves":
        sys.exit(0)
    return float(len(completion))

def size(completion, row):
    return len(row["image"]["bytes"]) + row["image"]["bytes"][0] + (row["image"]["path"] is None)

def seen(completion):
    return sum(name in os.environ for name in completion.split())

class Judge:
    max_concurrency = 4
    def __init__(self):
        self.calls = self.now = self.most = 0
    async def __call__(self, completion):
        if completion == "blocks":
            time.sleep(3600)
        if completion == "raises":
            raise LookupError("no verdict")
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(3600 if completion == "hangs" else 0.2)
        self.now -= 1
        return float(len(completion))
    def pop_metrics(self):
        taken, self.calls = {"calls": self.calls, "most": self.most}, 0
        self.most = 0
        return taken

TERMS = {"odd": [WeightedReward("odd", odd)]}
TERMS["judge"] = [WeightedReward("judge", Judge()), WeightedReward("odd", odd, 0.5)]
TERMS["seen"] = [WeightedReward("seen", seen)]
TERMS["size"] = [WeightedReward("size", size)]
rollout = SimpleNamespace(reward_timeout_s=2.0)
worker.load_run = lambda folder: SimpleNamespace(config=SimpleNamespace(rewards=[], rollout=rollout))
worker.build_rewards = lambda selections: RewardSum(TERMS[os.environ["TERMS"]])
worker.main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
"""


class Workers:
    """Starts them with rewards of this test's."""

    def __init__(self) -> None:
        self.started = 0

    async def start(self, name: str, run_dir: Path, timeout_s: float) -> RewardProcess:
        self.started += 1
        return await START(name, run_dir, timeout_s, program=("-c", PROGRAM))


START = RewardProcess.start


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workers:
    monkeypatch.setenv("TERMS", "odd")
    (tmp_path / "config.yaml").write_text("rewards:\n- {type: mine.py:judge, key: 'env:JUDGE_KEY'}\n")
    made = Workers()
    monkeypatch.setattr(RewardProcess, "start", made.start)
    return made


def test_every_completion_has_its_own_reward_whatever_a_reward_does(tmp_path: Path, workers: Workers) -> None:
    asked = ["one", "forks", "three", "leaves", "sixsix", "forks", "sevenseven"]

    async def work() -> list[Any]:
        pool = RewardPool(tmp_path, count=1, timeout_s=HANG_S, start_timeout_s=HANG_S)
        try:
            await pool.start()
            row: dict[str, Any] = {"row": {}}
            scores = [pool.score({"completion": completion, **row}) for completion in asked]
            found = await asyncio.gather(*scores, return_exceptions=True)
            assert workers.started == 1, "neither of them costs a process"
            return found
        finally:
            await pool.close()

    found = asyncio.run(asyncio.wait_for(work(), HANG_S))
    for completion, score in zip(asked, found, strict=True):
        if completion == "leaves":
            assert isinstance(score, RewardError)
            assert "reward 'odd' raised SystemExit" in str(score)
        else:
            assert score.value == len(completion)


def test_a_reward_gets_the_bytes_of_its_row(tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMS", "size")
    file = bytes([200, 0, 255]) * 100_000

    async def work() -> float:
        pool = RewardPool(tmp_path, count=1, timeout_s=HANG_S, start_timeout_s=HANG_S)
        try:
            await pool.start()
            arguments = {"completion": "a", "row": {"image": {"bytes": file, "path": None}}}
            return (await pool.score(arguments)).value
        finally:
            await pool.close()

    assert asyncio.run(asyncio.wait_for(work(), HANG_S)) == len(file) + 200 + 1


def judged(
    tmp_path: Path, workers: Workers, asked: list[str], timeout_s: float = HANG_S
) -> tuple[list[Any], int, dict[str, float]]:
    """What a judge says of completions, how many processes were started, and what it has counted."""

    async def work() -> tuple[list[Any], int, dict[str, float]]:
        pool = RewardPool(tmp_path, count=1, timeout_s=timeout_s, start_timeout_s=HANG_S)
        try:
            await pool.start()
            row: dict[str, Any] = {"row": {}}
            scores = [pool.score({"completion": completion, **row}) for completion in asked]
            found = await asyncio.gather(*scores, return_exceptions=True)
            return found, workers.started, pool.pop_metrics()
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(work(), HANG_S))


def test_rewards_see_no_secret_that_the_config_does_not_name(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ["HF_TOKEN", "WANDB_API_KEY", "AWS_PROFILE", "AZURE_CLIENT_SECRET", "AREAL_TOKEN", "db_password"]
    for name in (*hidden, "JUDGE_KEY", "MAX_TOKENS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERMS", "seen")
    found, _, _ = judged(tmp_path, workers, [" ".join(hidden), "JUDGE_KEY MAX_TOKENS PATH"])
    assert [score.value for score in found] == [0, 3]


def test_coroutines_score_several_at_a_time_and_each_its_own(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMS", "judge")
    asked = ["x" * (1 + n % 5) for n in range(24)]
    found, started, metrics = judged(tmp_path, workers, [*asked, "raises", "hangs"])
    assert [score.value for score in found[:24]] == [1.5 * len(completion) for completion in asked]
    assert found[3].components == {"judge": 4.0, "odd": 4.0}
    assert "reward 'judge' raised LookupError: no verdict" in str(found[24])
    assert "longer than rollout.reward_timeout_s: 2" in str(found[25])
    assert started == 1, "whoever takes too long costs nobody else"
    assert metrics["judge/calls"] in {24, 25}, "the one that hangs may have been counted with another"
    assert metrics["judge/most"] >= 4


def test_a_coroutine_that_blocks_costs_its_process_and_one_completion(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMS", "judge")
    found, started, _ = judged(tmp_path, workers, ["blocks", "one", "two"], timeout_s=2.0)
    assert isinstance(found[0], RewardError)
    assert "longer than rollout.reward_timeout_s" in str(found[0])
    assert [score.value for score in found[1:]] == [4.5, 4.5]
    assert started == 2
