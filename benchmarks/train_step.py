"""Seconds of one train step on the demonstration's model: this engine against a naive padded Hugging Face loop.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py [--sharded] [--profile]

128 sequences of 20 to 32 tokens; Qwen3 with hidden size 96, 2 layers, 4 heads of 32, 2 key heads, vocabulary 50;
float32. A step is forward, log-probabilities, entropy, backward, clipping and AdamW. Runs are interleaved, medians
are printed. `--sharded` goes through `fully_shard` although there is one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_core.data import Metric, PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SEQUENCES, VOCABULARY = 128, 50


def make_model(folder: str) -> None:
    """Write a random model."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_batch() -> PackedBatch:
    """Random sequences, with advantages and weights for a policy gradient."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 33, (SEQUENCES,), generator=generator)
    total = int(lengths.sum())
    tokens = {
        "input_ids": torch.randint(VOCABULARY, (total,), generator=generator),
        "targets": torch.randint(VOCABULARY, (total,), generator=generator),
        "advantages": torch.randn(total, generator=generator),
    }
    return PackedBatch(Ragged(lengths, tokens))


def policy_gradient(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """A plain policy gradient; the cost of a real loss is about the same."""
    loss = -(batch["advantages"] * outputs["logprobs"]).sum() / 3328
    return LossResult(loss, {"entropy": Metric.mean(outputs["entropy"])})


def naive_step(folder: str, batch: PackedBatch) -> Callable[[], None]:
    """The loop that anybody writes first: pad to the longest, log-softmax of all logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    padded = {
        key: torch.nn.utils.rnn.pad_sequence(batch[key].split(batch.lengths.tolist()), batch_first=True)
        for key in ("input_ids", "targets", "advantages")
    }
    mask = torch.arange(int(batch.lengths.max())) < batch.lengths[:, None]

    def step() -> None:
        logits = model(input_ids=padded["input_ids"], attention_mask=mask.long()).logits
        log_p = torch.log_softmax(logits.float(), -1)
        logprobs = log_p.gather(2, padded["targets"][..., None])[..., 0]
        with torch.no_grad():
            (-(log_p.exp() * log_p).sum(-1) * mask).sum()
        (-(padded["advantages"] * logprobs * mask).sum() / 3328).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class ShardedEngine(FSDPEngine):
    """The engine as it is with several ranks."""

    def _must_shard(self) -> bool:
        return True


def engine_step(folder: str, batch: PackedBatch, engine: FSDPEngine) -> Callable[[], None]:
    """One update of the engine."""
    engine.setup(ModelReference(folder), ACTOR, OptimizerSettings(total_updates=1000, temperature=1.0))
    return lambda: engine.train([LossSpec("actor", batch, ["logprobs", "entropy"], policy_gradient)]) and None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharded", action="store_true", help="also measure fully_shard with one rank")
    parser.add_argument("--profile", action="store_true", help="print where the engine's step spends its time")
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        batch = make_batch()
        steps = {"naive": naive_step(folder, batch), "engine": engine_step(folder, batch, FSDPEngine(FSDPConfig()))}
        if options.sharded:
            steps["sharded"] = engine_step(folder, batch, ShardedEngine(FSDPConfig()))
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(options.repeat + 3):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= 3:
                    seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            ratio = statistics.median(seconds["naive"]) / statistics.median(values)
            sys.stdout.write(f"{name:8} {1000 * statistics.median(values):7.1f} ms   {ratio:.2f}x naive\n")
        if options.profile:
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    steps["engine"]()
            sys.stdout.write(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))


if __name__ == "__main__":
    main()
