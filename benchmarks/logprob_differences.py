"""How far an engine's log-probabilities are from transformers' float32 forward, before and after in-flight updates.

    OMP_NUM_THREADS=1 python benchmarks/logprob_differences.py hf|vllm|sglang [--modes recompute keep_cache]

Random two-layer models whose log-probabilities range widely (the conformance kit's), requests at three temperatures,
three weight updates while they are generated. Each token is compared under the weights of the version that it is
labeled with. Then models that each can say one token only, updated every few tokens: a token that does not belong to
its label is counted as mislabeled. The servers of vLLM and SGLang run on the CPU, in the environments of
`tests/servers_on_cpu/make_environment.py`, which are made first if need be.

In `keep_cache` tokens behind an update attend to keys and values of older weights, so that they must differ: how much
is a property of the models and not of the engine. By default the models have nothing in common; with `--step 0.01`
each differs from the one before as weights do that learn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.logging import disable_progress_bar

from areal_core.engines import ModelReference, WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_testing.conformance.models import FIRST_FORCED, load_reference, make_constant_model, make_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from areal_core.data import Generation
    from areal_core.servers import InferenceEngine

SERVERS_ON_CPU = Path(__file__).parent.parent / "tests" / "servers_on_cpu"
TEMPERATURES = (0.7, 1.0, 1.3)
PROMPTS = ([5, 17, 33, 8], [5, 17, 33, 8, 40, 41, 42, 43, 44], [60], [12, 7] * 11)
UPDATES = 3
LABEL_UPDATES = 24
BEFORE, CROSSED, AFTER = "before any update", "crossed an update", "one version, after updates"
SERVER_OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"enforce_eager": True, "distributed_executor_backend": "uni", "max_model_len": 16384},
    "sglang": {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "context_length": 16384,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        "sleep_on_idle": True,
    },
}
_numbers = itertools.count()


@dataclass
class Differences:
    """Absolute differences of one row of the table."""

    values: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.values:
            return f"{0:>8} {'-':>10} {'-':>10}"
        return f"{len(self.values):>8} {sum(self.values) / len(self.values):>10.2e} {max(self.values):>10.2e}"


def make_engine(name: str, mode: str, folder: Path) -> InferenceEngine:
    """A new engine of this name."""
    settings: dict[str, Any] = {"update_mode": mode, "max_concurrent_requests": 16}
    if name == "hf":
        from areal_hf.adapter import HFAdapter
        from areal_hf.config import HFConfig

        return ServerFleet(HFAdapter(HFConfig(**settings, device="cpu")), folder)
    words = [sys.executable, str(SERVERS_ON_CPU / "make_environment.py"), name]
    python = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    settings |= {
        "options": SERVER_OPTIONS[name],
        "environment": {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        "stream_interval": 8,
    }
    if name == "vllm":
        from areal_vllm.adapter import VLLMAdapter
        from areal_vllm.config import VLLMConfig

        program = [python, "-m", "vllm.entrypoints.openai.api_server"]
        return ServerFleet(VLLMAdapter(VLLMConfig(**settings, program=program)), folder)
    from areal_sglang.adapter import SGLangAdapter
    from areal_sglang.config import SGLangConfig

    program = [python, str(SERVERS_ON_CPU / "sglang_cpu.py")]
    return ServerFleet(SGLangAdapter(SGLangConfig(**settings, program=program)), folder)


@asynccontextmanager
async def running(name: str, mode: str, model: Path) -> AsyncIterator[InferenceEngine]:
    """An engine with `model` as version 0."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(name, mode, Path(folder))
        try:
            await engine.start(ModelReference(str(model), "float32"))
            yield engine
        finally:
            await engine.close()


def request(number: int, tokens: int) -> GenerationRequest:
    """The next request; temperatures and prompts take turns."""
    sampling = SamplingParameters(temperature=TEMPERATURES[number % 3], max_new_tokens=tokens)
    return GenerationRequest(f"difference-{next(_numbers)}", list(PROMPTS[number % 4]), sampling, number)


async def under_updates(
    engine: InferenceEngine, models: list[Path], tokens: int, pause_s: float
) -> list[tuple[GenerationRequest, Generation]]:
    """What was generated by six workers while every model but the first was synced in turn."""
    found: list[tuple[GenerationRequest, Generation]] = []
    is_over = False

    async def work(first: int) -> None:
        for number in itertools.count(first, 6):
            if is_over:
                return
            one = request(number, tokens)
            found.append((one, await engine.generate(one)))

    async def update() -> None:
        nonlocal is_over
        for version, folder in enumerate(models[1:], 1):
            await asyncio.sleep(pause_s)
            await engine.update_weights(WeightUpdate(version, folder))
        await asyncio.sleep(pause_s)
        is_over = True

    await asyncio.gather(update(), *(work(number) for number in range(6)))
    return found


class Reference:
    """transformers' own forward in float32, with the log-softmax in float64."""

    def __init__(self, models: list[Path]) -> None:
        self._models = [load_reference(folder) for folder in models]

    @torch.no_grad()
    def differences(self, asked: GenerationRequest, found: Generation) -> list[float]:
        """Of each token's log-probability, under the weights of its label."""
        whole = torch.tensor([asked.input_ids + found.output_ids])
        first = len(asked.input_ids) - 1
        tables = {
            version: torch.log_softmax(
                self._models[version](input_ids=whole).logits[0].double() / asked.sampling.temperature, -1
            )
            for version in set(found.versions)
        }
        told = zip(found.output_ids, found.logprobs, found.versions, strict=True)
        return [
            abs(logprob - float(tables[version][first + place, token]))
            for place, (token, logprob, version) in enumerate(told)
        ]


def make_models(folder: Path, architecture: str, step: float) -> list[Path]:
    """Version 0 and one model for each update; each goes a part of the way to another random model."""
    from safetensors.torch import load_file, save_file

    models = [make_model(folder / str(seed), architecture=architecture, seed=seed) for seed in range(UPDATES + 1)]
    for before, after in itertools.pairwise(models):
        old, new = (load_file(path / "model.safetensors") for path in (before, after))
        mixed = {name: old[name].lerp(new[name], step) for name in old}
        save_file(mixed, after / "model.safetensors", {"format": "pt"})
    return models


async def compare(name: str, mode: str, models: list[Path], tokens: int) -> None:
    """Print a row for each temperature and phase."""
    async with running(name, mode, models[0]) as engine:

        async def several(first: int) -> list[tuple[GenerationRequest, Generation]]:
            asked = [request(first + number, tokens // 2) for number in range(24)]
            return list(zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True))

        started = time.perf_counter()
        answers = {BEFORE: await several(0)}
        # So long that every update falls into the generation of the requests of that moment.
        seconds = time.perf_counter() - started
        answers[CROSSED] = await under_updates(engine, models, tokens, max(0.05, seconds / 4))
        answers[AFTER] = await several(1000)
    reference = Reference(models)
    rows: dict[tuple[float, str], Differences] = defaultdict(Differences)
    for phase, pairs in answers.items():
        for asked, found in pairs:
            one_version = AFTER if found.versions[0] else BEFORE
            where = phase if phase != CROSSED or len(set(found.versions)) > 1 else one_version
            rows[asked.sampling.temperature, where].values += reference.differences(asked, found)
    for temperature, phase in itertools.product(TEMPERATURES, (BEFORE, CROSSED, AFTER)):
        print(f"{name:<7} {mode:<10} {temperature:>5} {phase:<27} {rows[temperature, phase]}", flush=True)


async def count_labels(name: str, mode: str, models: list[Path], tokens: int) -> None:
    """Print how many tokens do not belong to the version that they are labeled with."""
    async with running(name, mode, models[0]) as engine:
        found = await under_updates(engine, models, tokens, 0.02)
    labels = [(token, version) for _, one in found for token, version in zip(one.output_ids, one.versions, strict=True)]
    wrong = sum(token != FIRST_FORCED + version for token, version in labels)
    changes = sum(len(set(one.versions)) - 1 for _, one in found)
    per_change = len(labels) / max(1, changes)
    print(
        f"{name:<7} {mode:<10} mislabeled: {wrong} of {len(labels)} tokens in {len(found)} requests; "
        f"{len(models) - 1} updates, one in {per_change:.0f} tokens of a request",
        flush=True,
    )


async def main() -> None:
    """Make the models, run the engine in each mode, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("hf", "vllm", "sglang"))
    parser.add_argument("--modes", nargs="+", default=["recompute", "keep_cache"])
    parser.add_argument("--architecture", default="qwen3", help="of the random models: qwen3 or llama")
    parser.add_argument("--step", type=float, default=1.0, help="of an update, as part of the way to another model")
    parser.add_argument("--tokens", type=int, default=192, help="of a request while weights are updated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        random, constant = Path(folder) / "random", Path(folder) / "constant"
        models = make_models(random, options.architecture, options.step)
        labels = [make_constant_model(constant / str(version), version) for version in range(LABEL_UPDATES + 1)]
        print(f"{'engine':<7} {'mode':<10} {'T':>5} {'tokens that':<27} {'count':>8} {'mean':>10} {'max':>10}")
        for mode in options.modes:
            await compare(options.engine, mode, models, options.tokens)
            await count_labels(options.engine, mode, labels, options.tokens)


if __name__ == "__main__":
    asyncio.run(main())
