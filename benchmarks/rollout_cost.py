"""CPU of the rollout controller and of a rollout worker for an answer, against a scripted SGLang server or a true one.

    python benchmarks/rollout_cost.py [--tokens 100 1000 8000] [--answers 2000] [--max-concurrency 256] [--workers 1]
    python benchmarks/rollout_cost.py --address http://127.0.0.1:30000 --model DIR

Three kinds of processes, over true connections: the server says at once what it was told to, in chunks as SGLang's and
with labels of its weights; workers run episodes of one turn and write segments; the controller gives slots and hears of
groups, without a ledger. CPU seconds are those of the process, all its threads; what is asked first is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from areal_core.config.sections import RolloutSection
from areal_core.data import Episode
from areal_core.data.trajectory import TrajectoryBuilder
from areal_core.engines import ModelReference
from areal_core.ledger.segments import SegmentWriter
from areal_core.messages.workflows import RunGroup, Welcome, WorkflowsReady
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteSlots, WorkerService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runs.rollout_worker import GC_THRESHOLD
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.rpc import connect
from areal_core.servers import SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance.models import make_model
from areal_testing.fakes import CountingDataset, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.sdk import WorkflowContext

PORT, INTERVAL, PROMPT, GROUP = 31987, 128, 64, 8
SPAWN = multiprocessing.get_context("spawn")


def serve_scripted() -> None:
    """A server that has its answers ready."""
    state, ready = {"label": "0"}, dict[tuple[int, str], list[bytes]]()

    def chunks(count: int) -> list[bytes]:
        if (count, state["label"]) not in ready:
            made = []
            for start in range(0, count, INTERVAL):
                end = min(start + INTERVAL, count)
                told = {
                    "id": "0", "prompt_tokens": PROMPT, "completion_tokens": end, "cached_tokens": 0,
                    "finish_reason": {"type": "length", "length": count} if end == count else None,
                    "output_token_logprobs": [[-1.0625 - place / 3e4, 7, None] for place in range(start, end)],
                    "weight_versions": [{"version": state["label"], "start": 0, "end": end}],
                }  # fmt: skip
                event = {"text": "", "output_ids": [7 + place % 30 for place in range(start, end)], "meta_info": told}
                made.append(b"data: " + json.dumps(event).encode() + b"\n\n")
            ready[count, state["label"]] = [*made, b"data: [DONE]\n\n"]
        return ready[count, state["label"]]

    async def generate(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks(asked["sampling_params"]["max_new_tokens"]):
            await response.write(chunk)
        return response

    async def info(_: web.Request) -> web.Response:
        return web.json_response(
            {"version": "0.5.23", "tp_size": 1, "context_length": 1 << 20, "max_running_requests": 4096,
             "model_path": "/nowhere", "dtype": "float32"}
        )  # fmt: skip

    async def other(request: web.Request) -> web.Response:
        asked = await request.json() if request.can_read_body else {}
        state["label"] = asked.get("new_version", asked.get("weight_version", state["label"]))
        return web.json_response({"success": True})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/server_info", info)])
    app.add_routes([web.post("/{any}", other), web.get("/{any}", other)])
    web.run_app(app, host="127.0.0.1", port=PORT, print=None, access_log=None)


class Turns:
    """The cheapest workflow: a conversation of so many turns.

    Args:
        count: of turns.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        conversation = TrajectoryBuilder()
        for _ in range(self._count):
            conversation.add_context([5] * PROMPT)
            conversation.add_generation(await context.generate(conversation.input_ids))
        return Episode([conversation.build()], 1.0)


def settings(server: str) -> SGLangConfig:
    """Of the one server."""
    return SGLangConfig.model_validate({"servers": 0, "addresses": [server], "stream_interval": INTERVAL})


def work(address: str, server: str, folder: str, model: str, turns: int, times: Any, number: int) -> None:
    """A rollout worker."""

    async def run() -> None:
        peer = await connect(address, 60, f"worker-{number}")
        await peer.receive()
        slots = RemoteSlots(peer)
        client = ServerFleet(SGLangAdapter(settings(server)), Path(folder)).client(slots, ModelReference(model))
        runner = EpisodeRunner(Turns(turns), client, RewardSum([]), FakeTokenizer())
        writer = SegmentWriter(Path(folder) / "segments", Path(folder), f"worker-{number}", print)
        groups = GroupRunner(runner, CountingDataset(1 << 20), None, [], RolloutSection(), writer)
        peer.notify(WorkflowsReady(1 << 20, 0))
        gc.collect()
        gc.freeze()  # as a worker does
        gc.set_threshold(GC_THRESHOLD)
        serving = asyncio.ensure_future(WorkerService(peer, groups, slots).serve())
        while not serving.done():
            times[number] = time.process_time()
            await asyncio.sleep(0.05)

    run_event_loop(run())


async def control(arguments: argparse.Namespace, folder: str) -> None:
    """The rollout controller."""
    model = arguments.model or str(make_model(Path(folder) / "model"))
    engine = ServerFleet(SGLangAdapter(settings(arguments.address)), Path(folder))
    workers = RolloutWorkers(
        f"unix:{folder}/workers", engine, count=arguments.workers, start_timeout_s=120.0,
        welcome=Welcome(trains=True), timeline=Path(folder) / "timeline.jsonl", log=print,
    )  # fmt: skip
    address, times = await workers.listen(), SPAWN.Array("d", arguments.workers)
    processes = [
        SPAWN.Process(
            target=work, args=(address, arguments.address, folder, model, arguments.turns, times, number), daemon=True
        )
        for number in range(arguments.workers)
    ]
    for process in processes:
        process.start()
    await asyncio.gather(workers.start(), engine.start(ModelReference(model, arguments.dtype)))
    numbers, gate = iter(range(1 << 20)), asyncio.Semaphore(arguments.max_concurrency // GROUP)

    async def play(count: int, tokens: int) -> None:
        sampling = SamplingParameters(max_new_tokens=tokens)  # and no stop tokens: all of them come

        async def one() -> None:
            async with gate:
                number = next(numbers)
                ended = await workers.run(RunGroup(number, number, 0, tuple(range(GROUP)), sampling, False, 600.0))
            assert ended.record is not None, ended.facts.failure

        await asyncio.gather(*(one() for _ in range(count // GROUP)))

    print("| tokens | controller ms/answer | workers ms/answer | answers/s |\n|---|---|---|---|", flush=True)
    for tokens in arguments.tokens:
        await play(2 * arguments.max_concurrency, tokens)
        await asyncio.sleep(0.2)
        count = max(GROUP, arguments.answers * 100 // max(100, tokens) // GROUP * GROUP)
        answers = count * arguments.turns
        own, theirs, began = time.process_time(), sum(times), time.monotonic()
        await play(count, tokens)
        seconds = time.monotonic() - began
        await asyncio.sleep(0.2)
        each = [1e3 * spent / answers for spent in (time.process_time() - own, sum(times) - theirs)]
        print(f"| {tokens} | {each[0]:.3f} | {each[1]:.3f} | {answers / seconds:.0f} |", flush=True)
    await workers.close()
    await engine.close()
    for process in processes:
        process.kill()


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 1000, 8000])
    parser.add_argument("--answers", type=int, default=2000, help="of 100 tokens; fewer of longer ones")
    parser.add_argument("--max-concurrency", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1, help="of each conversation; each has an answer of its own")
    parser.add_argument("--address", default=f"http://127.0.0.1:{PORT}", help="of a true server; --model is its folder")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    server = SPAWN.Process(target=serve_scripted, daemon=True)
    if arguments.model is None:
        server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="areal-cost-") as folder:
            run_event_loop(control(arguments, folder))
    finally:
        if arguments.model is None:
            server.kill()


if __name__ == "__main__":
    main()
