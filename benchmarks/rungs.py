"""Train steps on each rung of the ladder beside transformers alone with padded rows, in one run.

    OMP_NUM_THREADS=1 python benchmarks/rungs.py [--tokens 4096] [--repeat 5]

A model of each rung (Qwen3 packed, LFM2 packed with convolutions, Qwen3.5 with mixers in rows, Gemma 2 in padded rows),
of four layers and 256 dimensions, in float32 on a CPU; sequences of 32 to 480 tokens. Padding is not among the tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from gpu_train_step import loss_of
from plain_loop import padded_loop
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal_core.data import PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen3_5_text": {
        "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "gemma2": {"head_dim": 64},
}  # fmt: skip


def seconds(step: Callable[[], Any], repeat: int) -> float:
    """Median of a step's seconds, after one that is not counted."""
    step()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print a row for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch, about")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 481, (options.tokens // 256,), generator=generator)
    total = int(lengths.sum())
    columns = {name: torch.randint(2000, (total,), generator=generator) for name in ("input_ids", "targets")}
    columns["advantages"] = torch.randn(total, generator=generator)
    batch = PackedBatch(Ragged(lengths, columns))
    print(f"{len(lengths)} sequences, {total} tokens\nfamily | rung | areal, tokens/s | transformers, tokens/s | ratio")
    for family, sizes in FAMILIES.items():
        config = CONFIG_MAPPING[family](**SIZES | sizes)
        config._attn_implementation = None
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            engine = FSDPEngine(FSDPConfig(learning_rate=1e-6, max_tokens_per_microbatch=total, compile=False))
            engine.setup(ModelReference(folder, "float32"), ACTOR, OptimizerSettings(1000, 1.0))
        work = LossSpec("actor", batch, ["logprobs"], loss_of(total, 0.0))
        own = seconds(lambda e=engine, w=work: e.train([w]), options.repeat)
        rung = engine._choice.rung if engine._choice else ""
        engine.close()
        other = seconds(padded_loop(config, columns, lengths.tolist(), recompute=False, autocast=False), options.repeat)
        print(f"{family} | {rung} | {total / own:,.0f} | {total / other:,.0f} | {other / own:.2f}", flush=True)


if __name__ == "__main__":
    main()
