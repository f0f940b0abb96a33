"""How long generation stalls while weights change under live requests, and what a fleet costs against a bare client.

    areal serve CONFIG --port 30000 &      # a server of the model in DIR, on the first GPU
    python benchmarks/weight_update_stall.py stall --address http://127.0.0.1:30000 --model DIR
    python benchmarks/weight_update_stall.py throughput --address ... --model DIR --concurrent 256

`stall` puts live requests on one SGLang server and updates its weights a few times, by broadcast from this process
(NCCL on the last GPU, gloo without GPUs) and from a folder in memory. It reports the seconds of each part of an update
and the longest silence that a request saw. `throughput` sends the same requests to the same server through the rollout
controller and with a bare HTTP client, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import aiohttp
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore, TCPStore

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode, Trajectory
from areal_core.data.sampler import PromptSampler
from areal_core.engines import ModelReference, TensorDescription, WeightUpdate
from areal_core.inference import http_client
from areal_core.inference.fleet import ServerFleet
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.runtime.rpc import encode_frame
from areal_core.servers import GenerationRequest, SamplingParameters
from areal_core.training.batches import read_batch
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.fakes import CountingDataset

TIMEOUT = timedelta(seconds=120)


class Staying(SGLangAdapter):
    """Goes the way of servers that label tokens themselves, which keep their requests during an update.

    Where the server is too old for that, all tokens of a partial generation are labeled with its last version: the
    times are those of a newer server, the labels are not.
    """

    label = "0"

    async def identify(self, connection):
        """As the adapter's own."""
        return replace(await super().identify(connection), reports_spans=True)

    async def receive(self, connection, group, tensors, label, mode):
        """As the adapter's own."""
        await super().receive(connection, group, tensors, label, mode)
        self.label = label

    async def load(self, connection, folder, label, mode):
        """As the adapter's own."""
        await super().load(connection, folder, label, mode)
        self.label = label

    async def set_label(self, connection, label):
        """As the adapter's own."""
        await super().set_label(connection, label)
        self.label = label

    async def generate(self, connection, partial):
        """As the adapter's own."""
        count = 0
        async with aclosing(super().generate(connection, partial)) as chunks:
            async for chunk in chunks:
                count += len(chunk.output_ids)
                yield replace(chunk, spans=[(self.label, 0, count)]) if chunk.spans is None else chunk


_NAME = re.compile(rb'"id":\s*"([^"]+)\.\d+"')


def note_arrivals() -> dict[bytes, list[float]]:
    """From now on: when something of a request came, across partial generations. Decoded when they end."""
    arrivals: dict[bytes, list[float]] = {}
    as_before = http_client._Socket.on_body

    def on_body(self: http_client._Socket, data: bytes) -> None:
        if named := _NAME.search(data):
            arrivals.setdefault(named[1], []).append(time.monotonic())
        as_before(self, data)

    http_client._Socket.on_body = on_body
    return arrivals


def settings_of(arguments: argparse.Namespace, interval: int) -> SGLangConfig:
    """Of one server, which runs already."""
    return SGLangConfig(
        servers=0,
        addresses=[arguments.address],
        update_mode=arguments.mode,
        stream_interval=interval,
        max_concurrent_requests=arguments.concurrent,
    )


def asked(number: int, prompt: int, tokens: int) -> GenerationRequest:
    """A request of exactly so many tokens."""
    ids = [(number * 31 + place * 7) % 50000 + 10 for place in range(prompt)]
    return GenerationRequest(f"bench-{number}", ids, SamplingParameters(max_new_tokens=tokens), seed=number)


class Sender:
    """Rank 0 of the broadcast group."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self._name, self._group = "", None

    async def join(self, engine: ServerFleet) -> float:
        """Form the group where there is none; seconds."""
        began = time.monotonic()
        group = await engine.form_group("127.0.0.1", self._store.port, self.backend, self._name)
        if group.is_new:
            store = self._store
            for prefix in group.prefixes:
                store = PrefixStore(prefix, store)
            if self.backend == "nccl":
                self._group = dist.ProcessGroupNCCL(store, 0, group.world_size, dist.ProcessGroupNCCL.Options())
            else:
                self._group = await asyncio.to_thread(dist.ProcessGroupGloo, store, 0, group.world_size, TIMEOUT)
            self._name = group.name
        return time.monotonic() - began

    def send(self) -> None:
        """All tensors, one after another, without waiting between them."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        works = [self._group.broadcast([tensor], options) for tensor in self.tensors.values()]
        for work in works:
            work.wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()


async def stall(arguments: argparse.Namespace) -> None:
    """See the module's text."""
    log = Path(tempfile.mkdtemp(prefix="areal-stall-"))
    settings = settings_of(arguments, arguments.interval)
    arrivals = note_arrivals()
    adapter = (Staying if arguments.keep_requests else SGLangAdapter)(settings)
    engine = ServerFleet(adapter, log, gpus=[0] if torch.cuda.is_available() else None)
    await engine.start(ModelReference(arguments.model, arguments.dtype))
    device = torch.device("cuda", torch.cuda.device_count() - 1) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    tensors = {}
    for path in sorted(Path(arguments.model).glob("*.safetensors")):
        tensors |= {name: value.to(device) for name, value in load_file(path).items()}
    described = tuple(
        TensorDescription(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in tensors.items()
    )
    sender = Sender(tensors)
    folder = Path(tempfile.mkdtemp(prefix="areal-stall-", dir="/dev/shm"))
    save_file({name: value.cpu() for name, value in tensors.items()}, folder / "model.safetensors")
    try:
        version, can_broadcast = 0, torch.cuda.device_count() != 1
        for transport in (["broadcast"] if can_broadcast else []) + ["folder"]:
            tasks = [
                asyncio.create_task(engine.generate(asked(number + 1000 * version, 64, arguments.tokens)))
                for number in range(arguments.concurrent)
            ]
            await asyncio.sleep(arguments.lead_s)
            for _ in range(arguments.updates):
                version += 1
                joined = await sender.join(engine) if transport == "broadcast" else 0.0
                await asyncio.sleep(1.0)
                began = time.monotonic()
                update = WeightUpdate(version, folder if transport == "folder" else None, described)
                work = asyncio.create_task(engine.update_weights(update))
                if transport == "broadcast":
                    await asyncio.to_thread(sender.send)
                await work
                seconds = time.monotonic() - began
                await asyncio.sleep(1.0)
                report(transport, version, joined, seconds, engine.pop_metrics(), arrivals, began)
            answers = await asyncio.gather(*tasks)
            crossed = sum(len(set(answer.versions)) > 1 for answer in answers)
            print(f"{transport}: {len(answers)} requests of {arguments.tokens} tokens, {crossed} crossed an update")
            assert all(answer.versions == sorted(answer.versions) for answer in answers)
    finally:
        await engine.close()


def report(transport, version, joined, seconds, metrics, arrivals, began) -> None:
    """One line of figures for one update."""
    silences, usual = [], []
    for times in arrivals.values():
        gaps = [(after - before, before, after) for before, after in pairwise(times)]
        usual += [gap for gap, before, after in gaps if began - 1 < before and after < began]
        met = [gap for gap, before, after in gaps if before <= began + seconds and after >= began]
        silences += [max(met)] if met else []
    parts = "  ".join(
        f"{name} {1000 * metrics.get(f'weight_sync/{name}_s', 0):.0f}" for name in ("pause", "transfer", "resume")
    )
    print(
        f"{transport} version {version}: join {1000 * joined:.0f} ms, update {1000 * seconds:.0f} ms ({parts}), "
        f"silence as requests saw it: median {1000 * statistics.median(silences or [0]):.0f} ms, "
        f"longest {1000 * max(silences or [0]):.0f} ms; usual gap {1000 * statistics.median(usual or [0]):.1f} ms",
        flush=True,
    )


def length_of(prompt: int, sample: int, arguments: argparse.Namespace) -> int:
    """So many tokens, or from half as many to half as many more: requests then do not end in step with each other."""
    tokens: int = arguments.tokens
    chance = random.Random(8 * prompt + sample)
    return chance.randint(tokens // 2, tokens + tokens // 2) if arguments.vary else tokens


class OneAnswer:
    """A workflow of one generation, without a tokenizer and a reward: what is measured is the runtime."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    async def run_episode(self, row, context) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        prompt = int(row["prompt"])
        ids = asked(prompt, self._arguments.prompt, 1).input_ids
        most = length_of(prompt, context.sample_index, self._arguments)
        generation = await context.generate(ids, max_new_tokens=most)
        return Episode([Trajectory.from_generation(ids, generation)], 1.0)


async def through_controller(engine, arguments: argparse.Namespace, requests: int) -> float:
    """Tokens per second through the rollout controller, ledger and packing included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segments = SegmentWriter(folder / "segments", folder, "worker", print)
        groups, size = arguments.concurrent // 8, 8
        runner = EpisodeRunner(OneAnswer(arguments), engine, RewardSum([]), None)
        ledger = Ledger(folder / "ledger", folder)
        section = RolloutSection(batch_size=groups, group_size=size, max_staleness=10**6, stale="keep")
        controller = RolloutController(
            section,
            GroupRunner(runner, CountingDataset(4096), None, [], section, segments),
            engine,
            PromptSampler(4096, 0, shuffle=False),
            SamplingParameters(max_new_tokens=2 * arguments.tokens),
            ledger,
        )
        controller.start()
        for step in range(2):
            await controller.next_batch(step)
        began, tokens, step = time.monotonic(), 0.0, 2
        for _ in range(max(1, requests // (groups * size))):
            manifest = bytes(encode_frame(await controller.next_batch(step)))
            tokens += read_batch(folder, section, manifest).metrics["batch/sampled_tokens"]
            step += 1
        seconds = time.monotonic() - began
        await controller.close()
        ledger.close()
        return tokens / seconds


async def bare(address: str, arguments: argparse.Namespace, requests: int) -> float:
    """Tokens per second of a client that does nothing but post the same requests, always so many at once."""
    tokens, began, ended, finished = 0, 0.0, 0.0, 0
    numbers = iter(range(10**9))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            nonlocal tokens, began, ended, finished
            while not ended:
                number = next(numbers)
                prompt, sample = (number // 8) % 4096, number % 8
                most = length_of(prompt, sample, arguments)
                sent = {
                    "input_ids": asked(prompt, arguments.prompt, 1).input_ids,
                    "sampling_params": {"max_new_tokens": most, "temperature": 1.0, "ignore_eos": True},
                    "return_logprob": True,
                }
                async with session.post(f"{address}/generate", json=sent) as response:
                    answer = await response.json()
                finished += 1
                if finished == 2 * arguments.concurrent:
                    began = time.monotonic()
                elif began and not ended:
                    tokens += len(answer["output_ids"])
                    if finished == requests + 2 * arguments.concurrent:
                        ended = time.monotonic()  # before fewer than `concurrent` are left

        await asyncio.gather(*(work() for _ in range(arguments.concurrent)))
    return tokens / (ended - began)


async def throughput(arguments: argparse.Namespace) -> None:
    """See the module's text."""
    log = Path(tempfile.mkdtemp(prefix="areal-throughput-"))
    adapter = SGLangAdapter(settings_of(arguments, arguments.interval))
    engine = ServerFleet(adapter, log, gpus=[0] if torch.cuda.is_available() else None)
    await engine.start(ModelReference(arguments.model, arguments.dtype))
    (connection,) = (member.connection for member in engine.pool.servers.values())
    address = connection.address
    ratios = []
    try:
        for turn in range(arguments.turns):
            sides = {
                "bare": lambda: bare(address, arguments, arguments.requests),
                "ours": lambda: through_controller(engine, arguments, arguments.requests),
            }
            rates = {}
            for name in sorted(sides, reverse=bool(turn % 2)):
                # A cache that is full makes the server evict, which costs more than what is measured.
                await connection.post("/flush_cache", query={"timeout": "30"}, is_json=False)
                rates[name] = await sides[name]()
            plain, ours = rates["bare"], rates["ours"]
            ratios.append(ours / plain)
            print(
                f"turn {turn}: bare {plain:,.0f} tokens/s, through the controller {ours:,.0f}, {ours / plain:.3f}",
                flush=True,
            )
        print(f"median ratio {statistics.median(ratios):.3f} at {arguments.concurrent} concurrent requests")
    finally:
        await engine.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stall", "throughput"))
    parser.add_argument("--address", required=True, help="of the server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", default="keep_cache")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--lead-s", type=float, default=2.0)
    parser.add_argument("--interval", type=int, default=32, help="tokens that arrive together; 1 overloads the client")
    parser.add_argument("--keep-requests", action="store_true", help="see Staying")
    parser.add_argument("--vary", action="store_true", help="answers of different lengths")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as on the server: NCCL cannot map memory of a process that chose otherwise
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    asyncio.run({"stall": stall, "throughput": throughput}[arguments.what](arguments))


if __name__ == "__main__":
    main()
