"""Samples and tokens per second of the embedded engine against `model.generate()`, in one interleaved run.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--concurrent 128] [--rounds 3]

Both generate for the same prompts on one thread with a random Qwen3-shaped character model (hidden size 96, 2 layers).
The engine is driven through its client under a steady load: groups of eight siblings, a new group as soon as one has
ended. `generate()` gets batches of as many rows; a batch lasts as long as its longest row, which is the point.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_core.engines import ModelReference
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig

VOCABULARY = 48
STOP_TOKENS = (3, 4)
SIBLINGS = 8


def make_model(folder: Path) -> Qwen3ForCausalLM:
    """A random model in the shape of the demonstration's, saved to `folder`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_prompts(groups: int) -> list[list[int]]:
    """One prompt of six to eight tokens for each group."""
    chance = random.Random(0)
    return [[chance.randrange(5, VOCABULARY) for _ in range(chance.randint(6, 8))] for _ in range(groups)]


async def engine_round(
    engine: ServerFleet, prompts: list[list[int]], concurrent: int, new_tokens: int
) -> tuple[float, float]:
    """Samples/s and tokens/s through the client, with `concurrent` requests under way."""
    sampling = SamplingParameters(max_new_tokens=new_tokens, stop_token_ids=STOP_TOKENS)
    waiting = iter(enumerate(prompts))
    tokens = 0

    async def groups() -> None:
        nonlocal tokens
        for number, prompt in waiting:
            requests = [
                GenerationRequest(f"{number}.{i}", prompt, sampling, number * SIBLINGS + i) for i in range(SIBLINGS)
            ]
            answers = await asyncio.gather(*map(engine.generate, requests))
            tokens += sum(len(answer.output_ids) for answer in answers)

    started = time.perf_counter()
    await asyncio.gather(*(groups() for _ in range(max(1, concurrent // SIBLINGS))))
    seconds = time.perf_counter() - started
    return len(prompts) * SIBLINGS / seconds, tokens / seconds


@torch.inference_mode()
def plain_round(model: Qwen3ForCausalLM, prompts: list[list[int]], rows: int, new_tokens: int) -> tuple[float, float]:
    """Samples/s and tokens/s of `generate()` on left-padded batches of `rows`; padding is not counted."""
    whole = [prompt for prompt in prompts for _ in range(SIBLINGS)]
    tokens = 0
    started = time.perf_counter()
    for first in range(0, len(whole), rows):
        batch = whole[first : first + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=new_tokens,
            eos_token_id=list(STOP_TOKENS),
            pad_token_id=0,
            top_k=0,
        )[:, width:]
        ended = torch.isin(output, torch.tensor(STOP_TOKENS))
        # A row counts up to its first stop token, that one included.
        tokens += int(((ended.cumsum(1) - ended.long()) == 0).sum())
    seconds = time.perf_counter() - started
    return len(whole) / seconds, tokens / seconds


async def main() -> None:
    """Run both in turns and print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=128, help="requests under way, and rows of generate()")
    parser.add_argument("--groups", type=int, default=512, help="prompts a round, eight samples each")
    parser.add_argument("--new-tokens", type=int, default=32, help="longest output")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = make_prompts(options.groups)
    rates: dict[str, list[tuple[float, float]]] = {"engine": [], "generate": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        settings = HFConfig(device="cpu", max_concurrent_requests=options.concurrent)
        engine = ServerFleet(HFAdapter(settings), Path(folder))
        await engine.start(ModelReference(folder))
        try:
            await engine_round(engine, prompts[:32], options.concurrent, options.new_tokens)
            for _ in range(options.rounds):
                rates["engine"].append(await engine_round(engine, prompts, options.concurrent, options.new_tokens))
                few = prompts[: options.groups // 4]
                rates["generate"].append(plain_round(model, few, options.concurrent, options.new_tokens))
        finally:
            await engine.close()
    medians = {
        name: {
            "samples_per_s": round(statistics.median(samples for samples, _ in found), 1),
            "tokens_per_s": round(statistics.median(tokens for _, tokens in found), 1),
        }
        for name, found in rates.items()
    }
    ratio = medians["engine"]["samples_per_s"] / medians["generate"]["samples_per_s"]
    print(json.dumps({"concurrent": options.concurrent, **medians, "ratio": round(ratio, 2)}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
