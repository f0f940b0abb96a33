"""Whether each token carries the version of the weights that sampled it, when weights change under many live requests.

    OMP_NUM_THREADS=1 python benchmarks/labels.py --engine hf|sglang|vllm [--live 256] [--updates 20] [--freeze 5]
    python benchmarks/labels.py --engine sglang --program "python3 -m sglang.launch_server" --device cuda

The path is that of a run: the rollout controller gives slots and changes weights, rollout workers (processes of their
own) ask the server themselves and write segments, which are read back here. Episodes have two turns, and the siblings
of a group share a prompt, so that a prefix which outlives an update shows. Groups go on until all versions have been
synced; `--freeze` sends a worker SIGSTOP in the middle of that, and SIGCONT some seconds later.

Versions are random models that have nothing in common. Each token's log-probability is compared with a plain float32
forward pass under every version: a token is wrong where its label's differs, and another version's where that of some
other agrees. How many would be wrong were all labels shifted by one says what the comparison can see. In `keep_cache`,
where keys and values are of older weights, versions are models that each can say one token only.

SGLang before 0.5.23 does not label tokens: requests end before an update and go on behind it. `--partial-generations`
has any SGLang go that way. Without `--program` the servers of `tests/servers_on_cpu/make_environment.py` are used.
The last line is a row of a table. The exit code is 1 where a token is wrong, and 2 where the run did not end in time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from labels_table import judge
from packaging.version import Version
from transformers.utils.logging import disable_progress_bar

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode, PackedBatch
from areal_core.data.trajectory import TrajectoryBuilder
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.ledger.segments import SegmentWriter, read_record
from areal_core.messages.workflows import RunGroup, Welcome, WorkflowsReady
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteSlots, WorkerService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.rpc import connect
from areal_core.servers import SamplingParameters, ServerFleet
from areal_testing.conformance.models import VOCABULARY, make_constant_model, make_model
from areal_testing.fakes import CountingDataset, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.sdk import WorkflowContext
    from areal_core.servers import LeaseHolder, SlotRequest

SERVERS_ON_CPU = Path(__file__).parent.parent / "tests" / "servers_on_cpu"
PROGRAMS = {"sglang": [str(SERVERS_ON_CPU / "sglang_cpu.py")], "vllm": ["-m", "vllm.entrypoints.openai.api_server"]}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPT, GROUP, TURNS = 48, 8, 2
COUNTED = ("partial_generations", "continued", "failed")
SPAWN = multiprocessing.get_context("spawn")


class TwoTurns:
    """An answer, a word of somebody else, and another answer; of lengths that differ among siblings.

    Args:
        tokens: of the longest answer.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        builder = TrajectoryBuilder()
        builder.add_context(random.Random(row["prompt"]).choices(range(3, VOCABULARY), k=PROMPT))
        drawn = random.Random(f"{row['prompt']} {context.sample_index}")
        for _ in range(TURNS):
            most = drawn.randint(self._tokens * 3 // 4, self._tokens)
            builder.add_generation(await context.generate(builder.input_ids, max_new_tokens=most))
            builder.add_context([5, 6, 7])
        return Episode([builder.build()], 1.0)


def cpu_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What servers must be told on a CPU."""
    config = yaml.safe_load((SERVERS_ON_CPU / f"{arguments.engine}.yaml").read_text())
    options: dict[str, Any] = config["inference_engine"]["options"]
    if arguments.engine == "vllm":
        return options | {"max_model_len": 4096, "max_num_seqs": arguments.slots}
    room = 2 * arguments.slots * (PROMPT + TURNS * (arguments.tokens + 3))
    most = {"max_total_tokens": max(65536, room), "max_running_requests": arguments.slots}
    return options | most | {"context_length": 4096}


def make_settings(arguments: argparse.Namespace) -> Any:
    """Of the engine, which starts its server."""
    settings: dict[str, Any] = {"update_mode": arguments.mode, "max_concurrent_requests": arguments.slots}
    if arguments.engine == "hf":
        from areal_hf.config import HFConfig

        return HFConfig(**settings, device=arguments.device)
    program, options = shlex.split(arguments.program), {}
    if not program:
        words = [sys.executable, str(SERVERS_ON_CPU / "make_environment.py"), arguments.engine]
        python = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        program, options = [python, *PROGRAMS[arguments.engine]], cpu_options(arguments)
    settings |= {"program": program, "options": options | json.loads(arguments.options), "stream_interval": 8}
    settings |= {} if arguments.program else {"environment": ENVIRONMENT}
    if arguments.engine == "sglang":
        from areal_sglang.config import SGLangConfig

        return SGLangConfig(**settings)
    from areal_vllm.config import VLLMConfig

    return VLLMConfig(**settings)


def make_engine(arguments: argparse.Namespace, settings: Any, folder: Path) -> Any:
    """An engine that has not been started."""
    if arguments.engine == "hf":
        from areal_hf.adapter import HFAdapter

        return ServerFleet(HFAdapter(settings), folder)
    if arguments.engine == "sglang":
        from areal_sglang import adapter
        from areal_sglang.adapter import SGLangAdapter

        if arguments.partial_generations:
            adapter.SPANS_SINCE = Version("9999")
        return ServerFleet(SGLangAdapter(settings), folder)
    from areal_vllm.adapter import VLLMAdapter

    return ServerFleet(VLLMAdapter(settings), folder)


def work(arguments: argparse.Namespace, settings: Any, address: str, folder: Path, number: int) -> None:
    """A rollout worker."""

    async def run() -> None:
        peer = await connect(address, 60, f"worker-{number}")
        await peer.receive()
        slots = RemoteSlots(peer)
        engine = make_engine(arguments, settings, folder)
        client = engine.client(slots, ModelReference(str(folder / "model0"), arguments.dtype))
        runner = EpisodeRunner(TwoTurns(arguments.tokens), client, RewardSum([]), FakeTokenizer())
        writer = SegmentWriter(folder / "segments", folder, f"worker-{number}", print)
        groups = GroupRunner(runner, CountingDataset(1 << 20), None, [], RolloutSection(), writer)
        peer.notify(WorkflowsReady(1 << 20, 0))
        await WorkerService(peer, groups, slots).serve()

    torch.set_num_threads(1)
    run_event_loop(run())


class CountedSlots:
    """The slots of an engine, and how many are held or waited for.

    Args:
        engine: gives them.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.live = engine, 0

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`."""
        self.live += 1
        self._engine.acquire(request, holder)

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        self.live -= 1
        self._engine.release(holder, has_failed=has_failed)


class Audited:
    """The controller's side: groups that are played, and versions that are synced under them.

    Args:
        arguments: of the program.
        engine: whose labels are looked at.
        slots: of the engine.
        workers: play groups.
        folder: with the weights, and with what workers write.

    Attributes:
        turns: of an episode.
        live: requests under way when a version was synced, for each.
        batches: what was generated, a group each.
        counts: what the engine has counted.
        stopped: versions that were synced while a worker was stopped.
    """

    turns = TURNS

    def __init__(
        self, arguments: argparse.Namespace, engine: Any, slots: CountedSlots, workers: RolloutWorkers, folder: Path
    ) -> None:
        self.arguments, self.engine, self.slots, self.workers, self.folder = arguments, engine, slots, workers, folder
        self.live: list[int] = []
        self.batches: list[PackedBatch] = []
        self.counts = Counter[str]()
        self.stopped: list[int] = []
        self._version, self._numbers = 0, itertools.count()

    async def play(self) -> None:
        """Groups one after another, until all versions are synced."""
        sampling = SamplingParameters(max_new_tokens=self.arguments.tokens)
        while self._version < self.arguments.updates:
            number = next(self._numbers)
            ended = await self.workers.run(RunGroup(number, number, 0, tuple(range(GROUP)), sampling, False, 3600.0))
            assert ended.record is not None, ended.facts.failure
            self.batches.append(PackedBatch.from_bytes(read_record(self.folder, ended.record)))
            assert len(self.batches[-1]) == GROUP, ended.facts.failure

    async def sync(self, began: float, pids: list[int]) -> None:
        """All versions, after pauses that differ; in the middle a worker is stopped for a while."""
        drawn, thaw = random.Random(0), None
        for version in range(1, self.arguments.updates + 1):
            await asyncio.sleep(drawn.uniform(0, 2 * self.arguments.every))
            if self.arguments.freeze and version == max(1, self.arguments.updates // 3):
                thaw = asyncio.ensure_future(self._freeze(pids[0]))
            asked = time.monotonic()
            self.live.append(self.slots.live)
            await self.engine.update_weights(WeightUpdate(version, self.folder / f"model{version}"))
            self._version = version
            told = self.engine.pop_metrics()
            self.counts.update({name: int(told.get(f"servers/{name}", 0)) for name in COUNTED})
            ended = time.monotonic()
            line = f"{ended - began:.1f} s: version {version}, which took {ended - asked:.2f} s"
            live = f"{self.live[-1]} requests live, {self.workers.waiting} without a slot behind it"
            print(f"{line}; {live}", file=sys.stderr)
        if thaw is not None:
            await thaw

    async def _freeze(self, pid: int) -> None:
        first = self._version
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.arguments.freeze)
        finally:
            os.kill(pid, signal.SIGCONT)
        self.stopped = [*range(first + 1, self._version + 1)]

    @property
    def version(self) -> str:
        """Of the engine's program."""
        (server,) = self.engine.pool.servers.values()
        return server.identity.version


async def control(arguments: argparse.Namespace, settings: Any, folder: Path) -> tuple[Audited, str]:
    """The rollout controller."""
    engine = make_engine(arguments, settings, folder)
    slots = CountedSlots(engine)
    workers = RolloutWorkers(
        f"unix:{folder}/workers", slots, count=arguments.workers, start_timeout_s=120.0,
        welcome=Welcome(trains=True), timeline=folder / "timeline.jsonl", log=print,
    )  # fmt: skip
    workers.on_failure = lambda *told: print("an attempt failed:", *told, file=sys.stderr)
    address = await workers.listen()
    processes = [
        SPAWN.Process(target=work, args=(arguments, settings, address, folder, number), daemon=True)
        for number in range(arguments.workers)
    ]
    for process in processes:
        process.start()
    try:
        await asyncio.gather(workers.start(), engine.start(ModelReference(str(folder / "model0"), arguments.dtype)))
        audited, began = Audited(arguments, engine, slots, workers, folder), time.monotonic()
        playing = [audited.play() for _ in range(arguments.live // GROUP)]
        async with asyncio.timeout(arguments.limit):
            await asyncio.gather(audited.sync(began, [process.pid or 0 for process in processes]), *playing)
        return audited, audited.version
    except TimeoutError:
        print(f"not ended after {arguments.limit:g} s: {engine.describe()}; {workers.waiting} wait", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        await workers.close()
        await engine.close()
        for process in processes:
            process.kill()


def main() -> None:
    """Make the versions, play, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("hf", "sglang", "vllm"), required=True)
    parser.add_argument("--mode", choices=("recompute", "keep_cache"), default="recompute")
    parser.add_argument("--live", type=int, default=256, help="requests under way at once")
    parser.add_argument("--slots", type=int, help="of the engine; by default as many as live requests")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between updates, in the mean")
    parser.add_argument("--tokens", type=int, default=192, help="of the longest answers")
    parser.add_argument("--freeze", type=float, nargs="?", const=5.0, default=0.0, help="seconds")
    parser.add_argument("--program", default="", help="words that start the server")
    parser.add_argument("--options", default="{}", help="of the server, as JSON")
    parser.add_argument(
        "--partial-generations", action="store_true", help="treat any SGLang as one that does not label tokens"
    )
    parser.add_argument("--device", default="cpu", help="of the forward passes and of hf")
    parser.add_argument("--dtype", default="float32", help="of the servers; others only in keep_cache")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds until what is under way counts as hanging")
    arguments = parser.parse_args()
    arguments.slots = arguments.slots or arguments.live
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="areal-labels-") as name:
        folder = Path(name)
        for version in range(arguments.updates + 1):
            target = folder / f"model{version}"
            if arguments.mode == "recompute":
                make_model(target, seed=version)
            else:
                make_constant_model(target, version)
        audited, found = asyncio.run(control(arguments, make_settings(arguments), folder))
        sys.exit(0 if judge(audited, found) else 1)


if __name__ == "__main__":
    main()
