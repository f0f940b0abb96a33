"""Do batches bunch? The true rollout controller under a simulated server and trainer, in simulated time.

    python benchmarks/admission.py [--steps 80] [--case small-model ...] [--groups 0 64 32] [rollout.key=value ...]

A forward pass of the server takes `pass_s + token_s` for each live request `+ prefill_s` for each new one, and gives
each live request a token: that of one Python process in front of a GPU. An update of the weights stops it for
`pause_s`. The trainer takes the oldest batch, trains for `train_s` and writes the weights for `write_s`. With `--groups
N` a group starts only while fewer than N are running; 0 is areal's rule, which starts all that the bounds admit. The
seconds are the event loop's own, which jumps to the next event: the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.data.sampler import PromptSampler
from areal_core.engines import WeightUpdate
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.servers import SamplingParameters
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer
from areal_testing.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.messages.workflows import GroupResult, RunGroup
    from areal_core.sdk import WorkflowContext
    from areal_core.servers import GenerationRequest

ROWS = 100_000


@dataclass(frozen=True)
class Case:
    """Seconds of a server and a trainer, and the lengths of answers.

    Attributes:
        median, sigma, longest: tokens of an answer, lognormal.
        slots: requests that the server works on at once.
    """

    pass_s: float
    token_s: float
    prefill_s: float
    pause_s: float
    train_s: float
    write_s: float
    median: float = 30.0
    sigma: float = 0.6
    longest: int = 96
    slots: int = 512
    batch_size: int = 64
    group_size: int = 8


CASES = {
    # SmolLM2-135M on one H200, as measured with SGLang 0.5.17: generation is what a step waits for.
    "small-model": Case(0.0045, 9.5e-6, 1.1e-3, 0.40, 0.60, 0.25),
    "small-model, fast sync": Case(0.0045, 9.5e-6, 1.1e-3, 0.0, 0.60, 0.05),
    # The server is never full: an answer takes as long beside others as alone.
    "latency": Case(0.010, 1e-6, 1e-5, 0.05, 0.60, 0.05, median=64, sigma=0.8, longest=640),
    # Training takes longer than generation.
    "slow trainer": Case(0.0045, 9.5e-6, 1.1e-3, 0.05, 3.0, 0.05),
    # A few answers are ten times as long as the others.
    "long tails": Case(0.008, 2e-5, 1e-3, 0.05, 2.0, 0.2, median=64, sigma=1.0, longest=1024),
}


class SimulatedServer(FakeEngine):
    """Generates in forward passes that all live requests share."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self._case = case
        self._draw = random.Random(seed)
        self._new: list[tuple[int, asyncio.Future[None]]] = []
        self._live: list[tuple[int, int, asyncio.Future[None]]] = []
        self._passes = self._requests = 0
        self._arrived = asyncio.Event()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self.busy_s = 0.0

    async def serve(self) -> None:
        """Pass after pass."""
        case = self._case
        while True:
            await self._may_go_on.wait()
            admitted, self._new = self._new[: case.slots - len(self._live)], self._new[case.slots - len(self._live) :]
            for length, done in admitted:
                self._requests += 1
                heapq.heappush(self._live, (self._passes + length, self._requests, done))
            if not self._live:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            took = case.pass_s + case.token_s * len(self._live) + case.prefill_s * len(admitted)
            self.busy_s += took
            await asyncio.sleep(took)
            self._passes += 1
            while self._live and self._live[0][0] <= self._passes:
                heapq.heappop(self._live)[2].set_result(None)

    async def generate(self, request: GenerationRequest) -> Generation:
        """A request of a length that is drawn."""
        case = self._case
        length = min(case.longest, max(1, round(case.median * self._draw.lognormvariate(0, case.sigma))))
        version, done = self.version, asyncio.get_running_loop().create_future()
        self._new.append((length, done))
        self._arrived.set()
        request.on_slot_change(True)
        await done
        return Generation([1] * 2, [-1.0] * 2, [version, self.version], FinishReason.STOP)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Nothing is generated meanwhile."""
        self._may_go_on.clear()
        await asyncio.sleep(self._case.pause_s)
        await super().update_weights(update)
        self._may_go_on.set()


class OneGeneration:
    """A fixed prompt, one generation, a fixed reward."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        generation = await context.generate([1, 2, 3, 4])
        return Episode([Trajectory.from_generation([1, 2, 3, 4], generation)], 1.0)


class WatchedGroups(GroupRunner):
    """Remembers the oldest weights of each group, and runs at most `at_once` of them, the oldest first; 0 is all."""

    def __init__(self, at_once: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = asyncio.Semaphore(at_once or ROWS)
        self.oldest: dict[int, int] = {}

    async def run(self, task: RunGroup) -> GroupResult:
        """See `GroupRunner.run`."""
        async with self._free:
            ended = await super().run(task)
        self.oldest[task.number] = ended.outcome.versions[0]
        return ended


@dataclass
class Found:
    """Of a run: when each step ended, and what its batch was like."""

    ends: list[float]
    staleness: list[float]
    busy: float


async def simulate(case: Case, section: RolloutSection, at_once: int, steps: int, seed: int, folder: Path) -> Found:
    """Train so many steps, with so many groups at once."""
    engine = SimulatedServer(case, seed)
    server = asyncio.get_running_loop().create_task(engine.serve())
    ledger = Ledger(folder / "attempts/1/ledger", folder)
    runner = EpisodeRunner(OneGeneration(), engine, RewardSum([]), FakeTokenizer(), on_failure=ledger.failed)
    writer = SegmentWriter(folder / "segments", folder, "worker", print)
    groups = WatchedGroups(at_once, runner, CountingDataset(ROWS), None, [], section, writer)
    sampler, sampling = PromptSampler(ROWS, 0), SamplingParameters(max_new_tokens=case.longest)
    controller = RolloutController(section, groups, engine, sampler, sampling, ledger)
    controller.start()
    now, ends, staleness, syncing = asyncio.get_running_loop().time, [], [], None
    for step in range(steps):
        manifest = await controller.next_batch(step)
        ages = [step - manifest.synced[groups.oldest[number]] for number, _ in manifest.records]
        staleness.append(statistics.fmean(ages))
        await asyncio.sleep(case.train_s)
        if syncing is not None:
            await syncing
        await asyncio.sleep(case.write_s)
        syncing = asyncio.get_running_loop().create_task(controller.sync(WeightUpdate(step + 1, folder), step + 1))
        ends.append(now())
    busy = engine.busy_s / now()
    server.cancel()
    await controller.close()
    return Found(ends, staleness, busy)


def main() -> None:
    """A line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--groups", nargs="+", type=int, default=[0], help="running at once; 0 is as many as may")
    arguments, words = parser.parse_known_args()
    changes = dict(word.removeprefix("rollout.").split("=") for word in words)
    print(f"{'case':24}{'at most':>8}{'groups':>7}{'samples/s':>10}{'s/step':>8}{'spread':>7}{'stale':>6}{'busy':>5}")
    for name, bound, at_once in itertools.product(arguments.case, arguments.staleness, arguments.groups):
        case = CASES[name]
        section = RolloutSection(
            batch_size=case.batch_size, group_size=case.group_size, max_staleness=bound,
            max_pending_batches=bound + 1, stale="mask",
        )  # fmt: skip
        section = RolloutSection.model_validate(section.model_dump() | changes)
        found = []
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                run = simulate(case, section, at_once, arguments.steps, seed, Path(folder))
                found.append(runner.run(run))
        steady = arguments.steps // 4
        took = [b - a for one in found for a, b in itertools.pairwise(one.ends[steady:])]
        stale = statistics.fmean(age for one in found for age in one.staleness[steady:])
        print(
            f"{name:24}{bound:8}{at_once or 'all':>7}{case.batch_size * case.group_size / statistics.fmean(took):10.0f}"
            f"{statistics.fmean(took):8.2f}{statistics.pstdev(took):7.2f}{stale:6.2f}"
            f"{statistics.fmean(one.busy for one in found):5.2f}  {[round(x, 2) for x in took[-6:]]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
