"""All parameters against a LoRA adapter on one GPU: a train step, its memory, and a weight update, as two tables.

    python benchmarks/gpu_adapters.py [--rows all lora lora-recompute] [--rank 16]

The model and the batch are those of `gpu_train_step.py`, of Qwen2-7B's sizes: random weights, 32,768 packed tokens, a
policy gradient. Model FLOPs are 6 N T where all parameters learn and 4 N T of frozen matrices, and causal attention's;
MFU is against the rate of an 8192-cubed bfloat16 product in the same run. A weight update is read through
`named_full_parameters`, merged where there is an adapter; the adapter alone is what an export writes beside it. A row
without the memory says so, and the next one goes on. `--tiny` tries the script itself, on any machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_train_step import GIB, Setting, loss_of, make_batch, make_setting, matrix_rate
from transformers import AutoModelForCausalLM

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.sharding import whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FULL = {"activation_checkpointing": "full"}
ROWS: dict[str, dict[str, Any]] = {
    "all": {},
    "all-recompute": FULL,
    "all-recompute-half-moments": {**FULL, "optimizer_state_dtype": "bfloat16"},
    "all-recompute-offloaded-moments": {**FULL, "offload_optimizer": True},
    "lora": {"adapter": {}},
    "lora-recompute": {**FULL, "adapter": {}},
}
"""What rows change in the engine's settings; an adapter gets the rank that was asked for."""

DEFAULT = ["all-recompute-half-moments", "lora", "lora-recompute"]
"""What 141 GB have room for: all parameters only with both."""


@dataclass
class Measured:
    """The second table: what takes part in a weight update, and how long it takes to come by it.

    Attributes:
        updates: name, tensors, bytes, milliseconds.
    """

    updates: list[tuple[str, int, int, float]] = field(default_factory=list)

    def sync(self, setting: Setting, name: str, read: Callable[[], Iterator[torch.Tensor]]) -> None:
        """Read each tensor of an update as a weight sync does, one at a time; the second time counts."""
        for _ in range(2):
            start, sizes = time.perf_counter(), [tensor.nbytes for tensor in read()]
            setting.wait()
            milliseconds = 1000 * (time.perf_counter() - start)
        self.updates.append((name, len(sizes), sum(sizes), milliseconds))
        setting.log(self.row(*self.updates[-1]))

    @staticmethod
    def row(name: str, count: int, size: int, milliseconds: float) -> str:
        """Of the table."""
        return f"| {name} | {count} | {size / 2**20:,.1f} | {milliseconds:,.0f} |"


def measure(setting: Setting, folder: str, name: str, settings: dict[str, Any], measured: Measured) -> None:
    """A row of both tables."""
    config = FSDPConfig(learning_rate=1e-6, max_tokens_per_microbatch=setting.tokens, **settings)
    engine = FSDPEngine(config)
    try:
        start = time.perf_counter()
        engine.setup(ModelReference(folder, "bfloat16"), ACTOR, OptimizerSettings(1000, 1.0))
        learning = sum(parameter.numel() for parameter in engine._parameters.values())
        setting.log(f"{name}: setup {time.perf_counter() - start:.1f} s, {learning:,} parameters learn")
        batch, loss = make_batch(setting), loss_of(setting.tokens, 0.0)
        share = done_flops(engine, setting) / setting.flops()
        setting.measure(
            name, lambda: engine.train([LossSpec("actor", batch, ["logprobs", "entropy"], loss)]), share=share
        )
        if "lora-" not in name:
            measured.sync(setting, f"{name}: all weights", lambda: (t for _, t in engine.named_full_parameters()))
        if engine._adapter is not None:
            own = partial(whole_of, device=setting.device, dtype=torch.bfloat16)
            measured.sync(setting, f"{name}: the adapter alone", lambda: map(own, engine._parameters.values()))
    except torch.OutOfMemoryError as error:
        setting.log(f"{name}: no memory: {str(error).partition('.')[0]}")
    finally:
        engine.close()


def done_flops(engine: FSDPEngine, setting: Setting) -> float:
    """Model FLOPs of a step, as the engine's own meter counts them."""
    decoder, learning = engine._decoder, engine._meter.learning
    return setting.flops() if decoder is None else decoder.training_flops(setting.lengths, learning)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=DEFAULT)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--size", default="7b", help="of the shapes of gpu_train_step.py")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    setting, measured = make_setting("tiny" if options.tiny else options.size, repeat=options.repeat), Measured()
    setting.rate = matrix_rate(setting.device, 256 if options.tiny else 8192)
    name = torch.cuda.get_device_name() if setting.device.type == "cuda" else "CPU"
    setting.log(f"{name}, torch {torch.__version__}, matrix rate {setting.rate / 1e12:.2f} TFLOP/s")
    with tempfile.TemporaryDirectory() as folder:
        with setting.device:
            AutoModelForCausalLM.from_config(setting.config, dtype=torch.bfloat16).save_pretrained(folder)
        setting.free()
        for row in options.rows:
            settings = {**ROWS[row], **({"adapter": {"rank": options.rank}} if "adapter" in ROWS[row] else {})}
            measure(setting, folder, row, settings, measured)
            setting.free()
    head = "| | ms | tokens/s | MFU | peak GiB |\n|---|---|---|---|---|"
    setting.log("\n".join(["", head, *(setting.row(*row) for row in setting.rows)]))
    head = "| a weight update | tensors | MiB | ms |\n|---|---|---|---|"
    setting.log("\n".join(["", head, *(measured.row(*row) for row in measured.updates)]))
    if setting.device.type == "cuda":
        setting.log(f"\nof {torch.cuda.get_device_properties(0).total_memory / GIB:.1f} GiB")


if __name__ == "__main__":
    main()
