"""One train step on one GPU: the FSDP engine beside a careful plain PyTorch loop, in one run, as a table.

    python benchmarks/gpu_train_step.py [--kernels torch flash4] [--rows plain engine recompute] [--profile]
    python benchmarks/gpu_train_step.py --size 30b-a3b-slice --microbatches

A policy gradient on a model of Qwen2-1.5B's sizes with random weights: 32,768 packed tokens in 17 sequences of 256 to
3,835. Model FLOPs are 6 N T and causal attention's; MFU is against the bfloat16 matrix rate that an 8192-cubed product
reaches in the same run. `--tiny` tries the script itself, on any machine, with `--size` an MoE's as well.

`padded` is what transformers alone does with sequences of unequal lengths: a padded row for each.

The slice has the widths of Qwen3-30B-A3B and four of its 48 layers. N is then what a token is computed with. Experts
are computed by grouped matrix products in both programs; under autocast these would compute in float32, so the plain
loop has parameters and optimizer in bfloat16, which the engine has in float32.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from gpu_train_step_sizes import HYBRIDS, MOES, SHAPES, SINKS, head_size, make_config
from plain_loop import padded_loop, plain_loop
from transformers import AutoModelForCausalLM

from areal_core.data import Metric, PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_fsdp.attention.hugging_face import Layout
from areal_fsdp.attention.kernels import _MAKERS
from areal_fsdp.attention.packed import Reach
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.planning.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GIB = 2**30
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|fprop|bprop|cudnn",
    "matrix products": r"gemm|nvjet|xmma|cublas|splitk|wgmma",
    "optimizer": r"adam|multi_tensor|lpnorm|is_finite|sqrt_sub_where",
    "copies": r"memcpy|memset",
    "collectives": r"nccl",
}

ENGINES: dict[str, dict[str, Any]] = {
    "engine": {},
    "selective": {"activation_checkpointing": "selective"},
    "budget": {"activation_checkpointing": "selective", "activation_memory_gib": 20},
    "recompute": {"activation_checkpointing": "full"},
    "half-moments": {"optimizer_state_dtype": "bfloat16"},
    "offloaded-moments": {"offload_optimizer": True},
    "offloaded-half-moments": {"offload_optimizer": True, "optimizer_state_dtype": "bfloat16"},
    "sharded": {},
}
"""Kinds of rows, and what they change in the engine's settings."""


@dataclass
class Setting:
    """Sizes, and what was measured."""

    config: Any
    lengths: list[int]
    device: torch.device
    repeat: int
    rate: float = 0.0
    rows: list[tuple[str, float, int, float, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return sum(self.lengths)

    def flops(self) -> float:
        """Of a step on one batch: 6 for each parameter and token, and causal attention."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        decoder = Decoder.of(self.config.to_dict(), shapes)
        assert decoder is not None
        return decoder.training_flops(self.lengths)

    def log(self, text: str) -> None:
        """Print at once: a run that is cut off has still said what it measured."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def measure(self, name: str, step: Callable[[], Any], batches: int = 1, share: float = 1.0) -> None:
        """Warm up, time and add a row; a row that fails says so and the others go on."""
        try:
            start = time.perf_counter()
            step()
            self.wait()
            first = time.perf_counter() - start
            repeat = self.repeat if batches == 1 else 2
            for _ in range(2 if batches == 1 else 1):
                step()
            self.wait()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = []
            for _ in range(repeat):
                start = time.perf_counter()
                step()
                self.wait()
                times.append(time.perf_counter() - start)
        except Exception:  # noqa: BLE001 - shown, and the next row may work
            self.log(f"{name}: {traceback.format_exc()[-2000:]}")
            return
        seconds = statistics.median(times)
        peak = torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0
        self.rows.append((name, seconds, batches, share, peak))
        spread = 1000 * (max(times) - min(times))
        self.log(f"{self.row(*self.rows[-1])} spread {spread:.0f} ms, first step {first:.1f} s")

    def row(self, name: str, seconds: float, batches: int, share: float, peak: float) -> str:
        """Of the table."""
        mfu = share * batches * self.flops() / seconds / self.rate
        return f"| {name} | {1000 * seconds:,.0f} | {batches * self.tokens / seconds:,.0f} | {mfu:.3f} | {peak:.0f} |"

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Memory and compiled code of the last configuration."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_setting(size: str = "1.5b", *, repeat: int, tiny: bool = False) -> Setting:
    """One of Qwen2's shapes or of the MoE models, or something like it for a CPU."""
    tiny = tiny or size == "tiny"
    count, least, most, total = (5, 2, 20, 60) if tiny else (17, 256, 3835, 32768)
    lengths = [round(least + (most - least) * (i / (count - 1)) ** 1.13) for i in range(count)]
    lengths[count // 2] += total - sum(lengths)
    config = make_config(size, tiny=tiny)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Setting(config, [lengths[i] for i in order], device, repeat)


def make_batch(setting: Setting, copies: int = 1) -> PackedBatch:
    """Random tokens, with advantages for a policy gradient."""
    generator = torch.Generator().manual_seed(1)
    total, vocabulary = copies * setting.tokens, setting.config.vocab_size
    columns = {
        "input_ids": torch.randint(vocabulary, (total,), generator=generator),
        "targets": torch.randint(vocabulary, (total,), generator=generator),
        "advantages": torch.randn(total, generator=generator),
    }
    return PackedBatch(Ragged(torch.tensor(setting.lengths * copies), columns))


def loss_of(total: int, weight: float) -> Callable[[PackedBatch, Mapping[str, torch.Tensor]], LossResult]:
    """A policy gradient, with an entropy bonus of `weight`; entropy is a metric where it is computed."""

    def loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        value = -(batch["advantages"] * outputs["logprobs"]).sum() / total
        if "entropy" not in outputs:
            return LossResult(value)
        if weight:
            value = value - weight * outputs["entropy"].sum() / total
        return LossResult(value, {"entropy": Metric.sum(outputs["entropy"].detach().sum() / total)})

    return loss


def matrix_rate(device: torch.device, side: int) -> float:
    """FLOP/s of a bfloat16 product of random matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for turn in range(33):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 13:
            times.append(time.perf_counter() - start)
    return 2 * side**3 / statistics.median(times)


def measure_kernels(setting: Setting, names: list[str]) -> None:
    """Attention alone: milliseconds of all layers of a step, forward and backward."""
    c = setting.config
    head = head_size(c)
    layout: Any = Layout.of(setting.lengths, setting.device, "auto").packed
    shapes = [(setting.tokens, n, head) for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    q, k, v = (torch.randn(shape, device=setting.device, dtype=torch.bfloat16) for shape in shapes)
    grad, reach = torch.randn_like(q), Reach(max(setting.lengths), head**-0.5, 0)
    flops = 2 * c.num_attention_heads * head * sum(length**2 for length in setting.lengths)
    for name in names:
        try:
            kernel = _MAKERS[name]()
            out, lse = kernel.forward(q, k, v, layout.bounds, reach)
            calls: dict[str, tuple[float, Callable[[], Any]]] = {
                "forward": (1.0, lambda k_=kernel: k_.forward(q, k, v, layout.bounds, reach)),
                "backward": (
                    2.5,
                    lambda k_=kernel, o=out, s=lse: k_.backward(grad, q, k, v, o, s, layout.bounds, reach),
                ),
            }
            for part, (factor, call) in calls.items():
                milliseconds = _milliseconds(call)
                rate = factor * flops / milliseconds / 1e9
                setting.log(f"{name} {part}: {c.num_hidden_layers * milliseconds:.1f} ms, {rate:.0f} TFLOP/s")
        except Exception:  # noqa: BLE001 - a kernel may be missing
            setting.log(f"{name}: {traceback.format_exc()[-600:]}")


def _milliseconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20


def profile(setting: Setting, name: str, step: Callable[[], Any]) -> None:
    """Where the device's time of one step goes, by kind of kernel, and the largest of the rest by name."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        step()
        setting.wait()
        wall = 1000 * (time.perf_counter() - start)
    kinds = dict.fromkeys([*KINDS, "rest"], 0.0)
    rest: list[tuple[float, int, str]] = []
    for event in found.key_averages():
        if "CUDA" not in str(event.device_type) or event.key.startswith(("Optimizer.step", "FSDP::")):  # spans
            continue
        milliseconds = event.self_device_time_total / 1000
        kind = next((kind for kind, words in KINDS.items() if re.search(words, event.key, re.IGNORECASE)), "rest")
        kinds[kind] += milliseconds
        rest += [(milliseconds, event.count, event.key)] if kind in ("rest", "optimizer", "copies") else []
    split = ", ".join(f"{kind} {value:.0f}" for kind, value in kinds.items())
    setting.log(f"profile of {name}, ms: {split}; sum {sum(kinds.values()):.0f}, wall {wall:.0f}")
    for milliseconds, count, key in sorted(rest, reverse=True)[:22]:
        setting.log(f"    {milliseconds:7.2f} ms {count:5d} x {key[:110]}")


class ShardedEngine(FSDPEngine):
    """The engine as it is with several ranks."""

    def _must_shard(self) -> bool:
        return True


def say_when_the_host_was_where(setting: Setting, engine: FSDPEngine, step: Callable[[], Any]) -> None:
    """How far the host is ahead of the device: milliseconds after the start of a step."""
    moments, update = [], engine._update

    def watched(rate: float) -> dict[str, float]:
        moments.append(time.perf_counter())
        event = torch.cuda.Event()
        event.record()
        moments.append(0.0 if event.query() else 1.0)
        return update(rate)

    engine._update = watched  # type: ignore[method-assign]
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    del engine._update
    busy = "busy" if moments[1] else "idle"
    setting.log(f"host begins the update at {1000 * (moments[0] - start):.0f} ms, device then {busy}; all done at "
                f"{1000 * (end - start):.0f} ms")  # fmt: skip


def engine_rows(setting: Setting, folder: str, kernel: str, options: argparse.Namespace, kind: str) -> None:
    """All rows of one engine; its settings are those of its kind."""
    shard, settings = kind == "sharded", ENGINES[kind]
    engine = (ShardedEngine if shard else FSDPEngine)(
        FSDPConfig(
            learning_rate=1e-6, attention_kernel=kernel, **settings,
            max_tokens_per_microbatch=round(1.02 * setting.tokens),  # room to cut copies into as many parts
        )
    )  # fmt: skip
    start = time.perf_counter()
    engine.setup(ModelReference(folder, "bfloat16"), ACTOR, OptimizerSettings(1000, 1.0))
    rung = engine._choice.rung if engine._choice else ""
    setting.log(f"setup {time.perf_counter() - start:.1f} s; computed as: {rung}")
    label = f"engine, {kernel} attention" + (f", {kind}" if kind != "engine" else "")
    batch, total = make_batch(setting), setting.tokens
    metric, both = loss_of(total, 0.0), ["logprobs", "entropy"]

    def learn(batch, loss, outputs):
        engine.train([LossSpec("actor", batch, outputs, loss)])

    if kind == "engine":
        setting.measure(f"{label}: log-probabilities", lambda: learn(batch, metric, ["logprobs"]))
    setting.measure(f"{label}: and entropy", lambda: learn(batch, metric, both))
    if shard:
        engine.close()
        return
    if options.profile:
        profile(setting, label, lambda: learn(batch, metric, both))
        if setting.device.type == "cuda":
            say_when_the_host_was_where(setting, engine, lambda: learn(batch, metric, both))
    if kind == "engine":
        bonus = loss_of(total, 0.01)
        setting.measure(f"{label}: entropy in the gradient", lambda: learn(batch, bonus, both))
        setting.measure(f"{label}: forward alone", lambda: engine.forward(batch, both), share=1 / 3)
    for count in options.microbatches:
        many = make_batch(setting, count)
        setting.measure(f"{label}: {count} micro-batches", lambda b=many: learn(b, metric, both), count)
    engine.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", default=["auto"], help="attention kernels of the engine's rows")
    parser.add_argument("--rows", nargs="*", default=["plain", "engine", "recompute"])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--attention", action="store_true", help="time each attention kernel by itself first")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--size", choices=[*SHAPES, *MOES, *HYBRIDS, *SINKS], default="1.5b")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    setting = make_setting(options.size, repeat=options.repeat, tiny=options.tiny)
    setting.rate = matrix_rate(setting.device, 256 if options.tiny else 8192)
    name = torch.cuda.get_device_name() if setting.device.type == "cuda" else "CPU"
    setting.log(f"{name}, torch {torch.__version__}, matrix rate {setting.rate / 1e12:.0f} TFLOP/s")
    if options.attention:
        measure_kernels(setting, list(_MAKERS))
    if "plain" in options.rows:
        columns = {key: value.to(setting.device) for key, value in make_batch(setting).tokens.values.items()}
        for compiles, recompute in ((False, False), (True, False), (True, True)):
            if not compiles and options.size not in MOES:
                continue
            label = f"plain loop, layers {'' if compiles else 'not '}compiled" + (
                ", checkpointing" if recompute else ""
            )
            step = plain_loop(setting.config, columns, setting.lengths, recompute=recompute, compiles=compiles)
            setting.measure(label, step)
            del step
            setting.free()
    if "padded" in options.rows:
        columns = {key: value.to(setting.device) for key, value in make_batch(setting).tokens.values.items()}
        setting.measure("transformers, padded rows", padded_loop(setting.config, columns, setting.lengths))
        setting.free()
    with tempfile.TemporaryDirectory() as folder:
        with setting.device:
            AutoModelForCausalLM.from_config(setting.config, dtype=torch.bfloat16).save_pretrained(folder)
        setting.free()
        for kernel in options.kernels:
            for kind in filter(options.rows.__contains__, ENGINES):
                engine_rows(setting, folder, kernel, options, kind)
                setting.free()
    again = matrix_rate(setting.device, 256 if options.tiny else 8192)
    rates = f"matrix rate {setting.rate / 1e12:.0f} before and {again / 1e12:.0f} after; MFU is against the higher"
    setting.rate = max(setting.rate, again)
    head = "| | ms | tokens/s | MFU | peak GiB |\n|---|---|---|---|---|"
    setting.log("\n".join(["", rates, "", head, *(setting.row(*row) for row in setting.rows)]))


if __name__ == "__main__":
    main()
