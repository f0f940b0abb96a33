"""What workflow workers and an endpoint cost: true runs with an engine that takes its time and computes nothing.

    python benchmarks/workflow_workers.py [--workers 1 2] [--episodes 1000] [--tool-s 5] [--tokens 32] [--turns 2]
    python benchmarks/workflow_workers.py endpoint [--tokens 50] [--token-s 0.02] [--at-once 64]

The first plays episodes that all run at once, each of some turns with a tool that is waited for between them: CPU time
of controller and workers by episode and by token, their memory, tokens by second. The second holds answers through the
endpoint against `context.generate`: the same sequences, one process, no run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import Episode, FinishReason, Generation, TrajectoryBuilder
from areal_core.testing.conformance.naive import NaiveEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces import GenerationRequest, ModelReference, WeightUpdate, WorkflowContext

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


class TimedEngine(NaiveEngine):
    """Draws nothing: every token takes its time, as on a server with room for all."""

    def __init__(self, token_s: float = 0.02) -> None:
        super().__init__()
        self._token_s = token_s

    async def start(self, model: ModelReference) -> None:
        """There is none."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """After as long as so many tokens take."""
        request.on_place(True)
        count = request.sampling.max_new_tokens
        await asyncio.sleep(count * self._token_s)
        return Generation([3] * count, [-0.1] * count, [self.version] * count, FinishReason.STOP)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Only the number."""
        self.version = update.version


class Waits:
    """Turns of the policy, and between them a tool that is waited for."""

    def __init__(self, tool_s: float, turns: int) -> None:
        self._tool_s = tool_s
        self._turns = turns

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow`."""
        builder = TrajectoryBuilder()
        builder.add_context(context.tokenizer.encode(row["prompt"]))
        for _ in range(self._turns):
            builder.add_generation(await context.generate(builder.input_ids))
            await asyncio.sleep(self._tool_s)
            builder.add_context([5] * 8)
        return Episode([builder.build()], random.random())


def usage(run_dir: Path) -> dict[str, tuple[float, float]]:
    """CPU seconds and MiB of the controller and of all workers, by role."""
    found: dict[str, tuple[float, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if "areal_core.runs" not in words or str(run_dir) not in words:
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            memory = int((folder / "statm").read_text().split()[1]) * PAGE_MIB
        except (OSError, IndexError):
            continue
        role = words[words.index("areal_core.runs") + 1]
        seconds, resident = found.get(role, (0.0, 0.0))
        found[role] = seconds + (int(fields[11]) + int(fields[12])) / TICKS, resident + memory
    return found


def play(arguments: argparse.Namespace, workers: int, base: Path) -> None:
    """One row."""
    run_dir, here = base / f"run-{workers}", Path(__file__).resolve()
    workflow = {"type": f"{here}:Waits", "tool_s": arguments.tool_s, "turns": arguments.turns}
    words = [
        "steps=3", f"run_dir={run_dir}", f"rollout.workers={workers}", "rewards=[]", "evaluation=null",
        f"workflow={json.dumps(workflow)}", f"sampling.max_new_tokens={arguments.tokens}",
        f"inference_engine={json.dumps({'type': f'{here}:TimedEngine', 'token_s': arguments.token_s})}",
        f"rollout.batch_size={arguments.episodes // 8}", "rollout.group_size=8", "rollout.max_staleness=0",
        "rollout.pipeline_depth=1", "algorithm.group_stages=[]", "publication.tolerance=1e9",
    ]  # fmt: skip
    with (base / "output").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_core", "run", "--plugins", "grpo", *words], stdout=out, stderr=out
        )
    metrics = run_dir / "metrics.jsonl"
    marks: list[tuple[float, dict[str, tuple[float, float]]]] = []
    peak: dict[str, float] = {}
    while process.poll() is None:
        steps = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        now = usage(run_dir)
        peak |= {role: max(memory, peak.get(role, 0.0)) for role, (_, memory) in now.items()}
        if steps > len(marks):
            marks.append((time.monotonic(), now))
        time.sleep(0.2)
    if process.returncode or len(marks) < 2:
        raise SystemExit((base / "output").read_text()[-3000:])
    (began, before), (ended, after) = marks[0], marks[-1]
    steps = len(marks) - 1
    episodes = steps * (arguments.episodes // 8) * 8
    tokens = episodes * arguments.turns * arguments.tokens
    bound = steps * arguments.turns * (arguments.tokens * arguments.token_s + arguments.tool_s)
    cells = [str(workers)]
    for role in ("controller", "workflow_worker"):
        seconds = after.get(role, (0.0, 0.0))[0] - before.get(role, (0.0, 0.0))[0]
        cells += [f"{1e3 * seconds / episodes:.2f}", f"{1e6 * seconds / tokens:.1f}", f"{peak.get(role, 0.0):.0f}"]
    cells += [f"{tokens / (ended - began):.0f}", f"{bound / (ended - began):.2f}"]
    print("|", " | ".join(cells), "|", flush=True)


def compare_workers(arguments: argparse.Namespace) -> None:
    """One run after another."""
    print("| workers | controller ms/episode | us/token | MiB | workers ms/episode | us/token | MiB | tokens/s | "
          "of the time that waiting alone takes |")  # fmt: skip
    print("|---" * 9 + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="areal-workers-", dir="/tmp") as folder:
        for workers in arguments.workers:
            play(arguments, workers, Path(folder))


async def compare_endpoint(arguments: argparse.Namespace) -> None:
    """The same sequences with and without HTTP between."""
    import aiohttp
    import openai
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from areal_agents.config import AgentSettings
    from areal_agents.workflow import AgentWorkflow

    bytes_alone = Tokenizer(models.BPE({byte: n for n, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    bytes_alone.pre_tokenizer, bytes_alone.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone)
    count, rounds = arguments.tokens, 4
    ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "47+38="}]}
    shared = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def generate(ids: list[int], **_: Any) -> Generation:
        await asyncio.sleep(count * arguments.token_s)
        return Generation([3] * count, [-0.1] * count, [0] * count, FinishReason.STOP)

    async def by_sdk(base_url: str, api_key: str) -> float:
        await shared.with_options(base_url=base_url, api_key=api_key).chat.completions.create(**ask)
        return 1.0

    async def by_http(base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with session.post(f"{base_url}/chat/completions", json=ask, headers=headers) as response:
            await response.json()
        return 1.0

    class Direct:
        async def run_episode(self, row: Mapping[str, Any], context: Any) -> Episode:
            builder = TrajectoryBuilder()
            builder.add_context([1, 2, 3])
            builder.add_generation(await context.generate(builder.input_ids))
            return Episode([builder.build()], 1.0)

    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = AgentSettings.model_validate({"agent": f"{__file__}:compare_workers", "chat_template": template})
    context: Any = SimpleNamespace(tokenizer=tokenizer, generate=generate, score=None)
    print("| way | tokens/s | of generate's |")
    print("|---|---|---|", flush=True)
    rates: list[float] = []
    for name, workflow in (
        ("context.generate", Direct()),
        ("the endpoint, plain HTTP", AgentWorkflow(settings, by_http)),
        ("the endpoint, OpenAI's SDK", AgentWorkflow(settings, by_sdk)),
    ):

        async def worker(played: Any = workflow) -> None:
            for _ in range(rounds):
                await played.run_episode({}, context)

        await workflow.run_episode({}, context)
        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(arguments.at_once)))
        rates.append(arguments.at_once * rounds * count / (time.monotonic() - began))
        print(f"| {name} | {rates[-1]:.0f} | {rates[-1] / rates[0]:.3f} |", flush=True)
    await session.close()


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="workers", choices=["workers", "endpoint"])
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--episodes", type=int, default=1000, help="all of them at once")
    parser.add_argument("--tool-s", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--token-s", type=float, default=0.02)
    parser.add_argument("--at-once", type=int, default=64, help="episodes, of the endpoint's table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "endpoint":
        asyncio.run(compare_endpoint(arguments))
    else:
        compare_workers(arguments)


if __name__ == "__main__":
    main()
