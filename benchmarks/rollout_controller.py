"""Episodes per second through the rollout controller with an engine that answers at once, ledger on.

    python benchmarks/rollout_controller.py [--batches N] [--tokens 64] [--sizes 256 1024 4096]

Each episode is a group of its own with trajectories of `--tokens` tokens and all their tensors. Every batch is durable
in the ledger before it is handed out, and its weights are "published" at once, so that generation never waits.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.data.sampler import PromptSampler
from areal_core.interfaces import SamplingParameters, WeightUpdate
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.testing.fakes import CountingDataset, FakeEngine, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces import GenerationRequest, WorkflowContext


class ZeroLatencyEngine(FakeEngine):
    """Answers every request with the same tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._ids, self._logprobs = list(range(tokens)), [-1.0] * tokens

    async def generate(self, request: GenerationRequest) -> Generation:
        """At once."""
        request.on_place(True)
        return Generation(self._ids, self._logprobs, [self.version] * len(self._ids), FinishReason.STOP)


class OneGeneration:
    """The cheapest workflow: a fixed prompt, one generation, a fixed reward."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        generation = await context.generate([1, 2, 3, 4])
        return Episode([Trajectory.from_generation([1, 2, 3, 4], generation)], 1.0)


async def measure(folder: Path, size: int, batches: int, tokens: int, group_size: int) -> tuple[float, float]:
    """Episodes per second after the first batch, and growth of memory in MiB from the tenth batch on."""
    engine = ZeroLatencyEngine(tokens)
    ledger = Ledger(folder / "attempts/1/ledger", folder)
    runner = EpisodeRunner(OneGeneration(), engine, RewardSum([]), FakeTokenizer(), on_failure=ledger.failed)
    dataset = CountingDataset(100_000)
    section = RolloutSection(batch_size=size // group_size, max_staleness=2, pipeline_depth=2, group_size=group_size)
    controller = RolloutController(
        section,
        GroupRunner(runner, dataset, None, [], section, SegmentWriter(folder / "segments", folder, "worker", print)),
        engine,
        PromptSampler(len(dataset), 0),
        SamplingParameters(max_new_tokens=tokens),
        ledger,
    )
    controller.start()
    began, memory = 0.0, 0.0
    for step in range(batches + 1):
        manifest = await controller.next_batch(step)
        assert len(manifest.records) * group_size == size
        if step == 0:
            began = time.perf_counter()
        if step == min(10, batches // 2):
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        await controller.publish(WeightUpdate(step + 1, folder), step + 1)
        if step % 10 == 9:
            await controller.commit(step + 1, folder / f"step-{step + 1}")
    seconds = time.perf_counter() - began
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - memory
    await controller.close()
    ledger.close()
    return batches * size / seconds, growth


def main() -> None:
    """Measure and print one line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096])
    arguments = parser.parse_args()
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        for size in arguments.sizes:
            folder = Path(tempfile.mkdtemp())
            try:
                rate, growth = runner.run(
                    measure(folder, size, arguments.batches, arguments.tokens, arguments.group_size)
                )
            finally:
                shutil.rmtree(folder)
            print(f"{size:6d} a batch: {rate:8,.0f} episodes/s, memory grew by {growth:.1f} MiB")


if __name__ == "__main__":
    main()
