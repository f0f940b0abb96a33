"""Episodes per second through the rollout controller with an engine that answers at once, ledger on.

    python benchmarks/rollout_controller.py [--batches N] [--tokens 64] [--sizes 256 1024 4096] [--workers 2]

Each episode is a group of its own, or of `--group-size`, with a trajectory of `--tokens` tokens and all that is known
of them. Every batch is durable in the ledger before it is handed out, and its weights are "synced" at once, so that
generation never waits. With `--workers` episodes run in so many rollout workers, each generation in a slot that the
controller gives, as in a run; without, in this process.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import shutil
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.data.sampler import PromptSampler
from areal_core.engines import WeightUpdate
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.messages.workflows import Welcome, WorkflowsReady
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteSlots, WorkerService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runs.rollout_worker import GC_THRESHOLD
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.rpc import connect
from areal_core.servers import Grant, SamplingParameters, SlotLease, SlotRequest
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from areal_core.sdk import WorkflowContext
    from areal_core.servers import GenerationRequest, LeaseHolder

ROWS = 100_000
SPAWN = multiprocessing.get_context("spawn")


class ZeroLatencyEngine(FakeEngine):
    """Answers every request with the same tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._ids, self._logprobs = list(range(tokens)), [-1.0] * tokens

    async def generate(self, request: GenerationRequest) -> Generation:
        """At once."""
        request.on_slot_change(True)
        return Generation(self._ids, self._logprobs, [self.version] * len(self._ids), FinishReason.STOP)


class Pool:
    """Slots of an engine that has as many as anybody wants."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """At once."""
        holder.give(Grant("server", "", self._engine.version, "", labels_tokens=True, context=1 << 20, vocabulary=256))

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """There are enough."""


class ZeroLatencyClient:
    """What a worker generates with: asks for a slot, and answers under its version."""

    capabilities = FakeEngine.capabilities

    def __init__(self, slots: RemoteSlots, tokens: int) -> None:
        self._slots, self._ids, self._logprobs = slots, list(range(tokens)), [-1.0] * tokens

    async def generate(self, request: GenerationRequest) -> Generation:
        """As soon as there is a slot."""
        async with SlotLease(self._slots, SlotRequest(), request.on_slot_change) as grant:
            return Generation(self._ids, self._logprobs, [grant.version] * len(self._ids), FinishReason.STOP)


def work(address: str, folder: Path, tokens: int, number: int) -> None:
    """A rollout worker."""

    async def run() -> None:
        peer = await connect(address, 60, f"worker-{number}")
        await peer.receive()
        slots = RemoteSlots(peer)
        runner = EpisodeRunner(OneGeneration(), ZeroLatencyClient(slots, tokens), RewardSum([]), FakeTokenizer())
        writer = SegmentWriter(folder / "segments", folder, f"worker-{number}", print)
        groups = GroupRunner(runner, CountingDataset(ROWS), None, [], RolloutSection(), writer)
        peer.notify(WorkflowsReady(ROWS, 0))
        gc.collect()
        gc.freeze()  # as a worker does
        gc.set_threshold(GC_THRESHOLD)
        await WorkerService(peer, groups, slots).serve()

    run_event_loop(run())


class OneGeneration:
    """The cheapest workflow: a fixed prompt, one generation, a fixed reward."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        generation = await context.generate([1, 2, 3, 4])
        return Episode([Trajectory.from_generation([1, 2, 3, 4], generation)], 1.0)


async def measure(
    folder: Path, size: int, batches: int, tokens: int, group_size: int, workers: int
) -> tuple[float, float]:
    """Episodes per second after the first batch, and growth of memory in MiB from the tenth batch on."""
    engine = ZeroLatencyEngine(tokens)
    ledger = Ledger(folder / "attempts/1/ledger", folder)
    section = RolloutSection(
        batch_size=size // group_size, max_staleness=2, max_pending_batches=2, group_size=group_size
    )
    async with running(folder, engine, ledger, section, tokens, workers) as groups:
        return await pull(folder, groups, engine, ledger, section, size, batches, tokens)


@asynccontextmanager
async def running(
    folder: Path, engine: FakeEngine, ledger: Ledger, section: RolloutSection, tokens: int, count: int
) -> AsyncIterator[Any]:
    """What runs groups: workers, or this process."""
    if not count:
        runner = EpisodeRunner(OneGeneration(), engine, RewardSum([]), FakeTokenizer(), on_failure=ledger.failed)
        writer = SegmentWriter(folder / "segments", folder, "worker", print)
        yield GroupRunner(runner, CountingDataset(ROWS), None, [], section, writer)
        return
    workers = RolloutWorkers(
        f"unix:{folder}/workers", Pool(engine), count=count, start_timeout_s=120.0,
        welcome=Welcome(trains=True), timeline=folder / "timeline.jsonl", log=print,
    )  # fmt: skip
    address = await workers.listen()
    processes = [SPAWN.Process(target=work, args=(address, folder, tokens, n), daemon=True) for n in range(count)]
    for process in processes:
        process.start()
    await workers.start()
    yield workers
    await workers.close()
    for process in processes:
        process.kill()


async def pull(
    folder: Path, groups: Any, engine: FakeEngine, ledger: Ledger, section: RolloutSection, size: int, batches: int,
    tokens: int,
) -> tuple[float, float]:  # fmt: skip
    """Batches as a trainer asks for them."""
    dataset = CountingDataset(ROWS)
    controller = RolloutController(
        section,
        groups,
        engine,
        PromptSampler(len(dataset), 0),
        SamplingParameters(max_new_tokens=tokens),
        ledger,
    )
    controller.start()
    began, memory = 0.0, 0.0
    for step in range(batches + 1):
        manifest = await controller.next_batch(step)
        assert len(manifest.records) * section.group_size == size
        if step == 0:
            began = time.perf_counter()
        if step == min(10, batches // 2):
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        await controller.sync(WeightUpdate(step + 1, folder), step + 1)
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
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096])
    arguments = parser.parse_args()
    run_event_loop(measure_all(arguments))


async def measure_all(arguments: argparse.Namespace) -> None:
    """A line for each size."""
    same = arguments.batches, arguments.tokens, arguments.group_size, arguments.workers
    for size in arguments.sizes:
        folder = Path(tempfile.mkdtemp())
        try:
            rate, growth = await measure(folder, size, *same)
        finally:
            shutil.rmtree(folder)
        print(f"{size:6d} a batch: {rate:8,.0f} episodes/s, memory grew by {growth:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
