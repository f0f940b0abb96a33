"""A pool with true worker processes, whose rewards fork and leave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.launcher import ProcessEnd
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.scoring import RewardError

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.interfaces.launcher import ProcessSpecification

HANG_S = 120.0
PROGRAM = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from areal_core.rewards import worker
from areal_core.rewards.scoring import RewardSum, RewardTerm

def odd(completion):
    if completion == "forks":
        os.fork()
    if completion == "leaves":
        sys.exit(0)
    return float(len(completion))

worker.load_run = lambda folder: SimpleNamespace(config=SimpleNamespace(rewards=[]))
worker.build_rewards = lambda selections: RewardSum([RewardTerm("odd", odd, 1.0)])
worker.main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
"""


class Worker:
    """A `RunningProcess`."""

    def __init__(self, specification: ProcessSpecification) -> None:
        self.name = specification.name
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM, *specification.command[-3:]])

    async def wait(self) -> ProcessEnd:
        return ProcessEnd(await asyncio.to_thread(self._process.wait), "")

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        self._process.kill()
        return await self.wait()


class Workers:
    """A `Processes`."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.started = 0

    async def start(self, specification: ProcessSpecification) -> Worker:
        self.started += 1
        return Worker(specification)


def test_every_completion_has_its_own_reward_whatever_a_reward_does(tmp_path: Path) -> None:
    asked = ["one", "forks", "three", "leaves", "sixsix", "forks", "sevenseven"]

    async def work() -> list[Any]:
        workers = Workers()
        pool = RewardPool(tmp_path, tmp_path, workers, count=1, timeout_s=HANG_S, start_timeout_s=HANG_S)
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
