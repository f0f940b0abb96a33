"""How far trainer and engine are apart on an MoE, with routing replay and without.

    OMP_NUM_THREADS=1 python benchmarks/routing_replay.py MODEL hf|sglang [--dtype bfloat16] [--trained float32]

MODEL is a folder, such as the one that `model_folder.txt` of a run of examples/moe.yaml names, which answers
additions; or `random`: a Qwen3-MoE of 8 layers with 64 experts each, of which a token goes through 8, that goes on with
random tokens. The trainer, with the same weights, gives the log-probabilities of what the engine wrote. Beside the
share of choices that differ stand the mean and the 99th percentile of the absolute difference of a token, and
KL(engine || trainer) by its estimate `exp(-d) - 1 + d`. SGLang runs on the CPU, in the environment of
tests/servers_on_cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from areal_core.data import Metric, PackedBatch, Trajectory, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.models.experts import ROUTED_EXPERTS
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_grpo.demonstration.additions import problems
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

if TYPE_CHECKING:
    from areal_core.servers import InferenceEngine

SERVER = Path(__file__).parents[1] / "tests" / "servers_on_cpu" / "sglang_cpu.py"
PYTHON = Path("~/.cache/areal/servers/sglang/bin/python").expanduser()
SHARPER = 4
"""Times the weights that transformers draws, so that tokens differ in what they are and where they go."""
OPTIONS = {
    "device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True, "disable_cuda_graph": True,
    "grammar_backend": "none", "mem_fraction_static": 0.1, "max_total_tokens": 65536, "max_running_requests": 128,
    "sleep_on_idle": True,
}  # fmt: skip


def make_engine(name: str, folder: Path) -> InferenceEngine:
    """A new engine of this name that tells its choices."""
    if name == "hf":
        return ServerFleet(HFAdapter(HFConfig(device="cpu", routed_experts=True)), folder)
    settings = SGLangConfig(
        program=[str(PYTHON), str(SERVER)], options=OPTIONS, environment={"OMP_NUM_THREADS": "1"}, routed_experts=True
    )
    return ServerFleet(SGLangAdapter(settings), folder)


def make_model(folder: Path) -> str:
    """A random model of many small experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        moe_intermediate_size=64, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARPER if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return str(folder)


def prompts_for(model: str, count: int) -> tuple[list[list[int]], SamplingParameters]:
    """Additions for a model that reads, random tokens for one that does not."""
    if not (Path(model) / "tokenizer.json").is_file():
        draw = random.Random(0)
        return [[draw.randrange(256) for _ in range(8)] for _ in range(count)], SamplingParameters(max_new_tokens=64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer.encode(f"{first}+{second}=") for first, second in problems("train")[:count]]
    return asked, SamplingParameters(max_new_tokens=22, stop_token_ids=(tokenizer.eos_token_id,))


async def generated(name: str, model: ModelReference, count: int, logs: Path) -> PackedBatch:
    """Answers to so many prompts, as training reads them."""
    asked, sampling = prompts_for(model.path, count)
    logs.mkdir()
    engine = make_engine(name, logs)
    try:
        await engine.start(model)
        requests = [GenerationRequest(str(i), ids, sampling, i) for i, ids in enumerate(asked)]
        made = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    found = [Trajectory.from_generation(ids, each) for ids, each in zip(asked, made, strict=True)]
    return shift_to_predictions(PackedBatch.from_trajectories(found))


def disagreement(engine: FSDPEngine, batch: PackedBatch) -> float:
    """The share of choices that differ, as training tells it."""

    def nothing(part: PackedBatch, outputs: dict[str, torch.Tensor]) -> LossResult:
        return LossResult(outputs["logprobs"].sum() * 0.0, {"tokens": Metric.sum(float(part.token_count))})

    return float(engine.train([LossSpec("any", batch, ["logprobs"], nothing)])["router_disagreement"].values)


def compare(batch: PackedBatch, model: ModelReference) -> None:
    """Print the table."""
    trainer = FSDPEngine(FSDPConfig())
    trainer.setup(model, ACTOR, OptimizerSettings(1, 1.0))
    mask = batch["loss_mask"]
    without = batch.with_tokens(**{ROUTED_EXPERTS: torch.zeros_like(batch[ROUTED_EXPERTS])})
    for name, part in (("without", without), ("with", batch)):
        found = trainer.forward(part, ["logprobs"])["logprobs"]
        d = (batch["logprobs"] - found)[mask]
        kl = float((torch.exp(-d) - 1 + d).mean())
        high = float(d.abs().quantile(0.99))
        print(f"{name:8} mean {float(d.abs().mean()):.2e}  99% {high:.2e}  KL {kl:.2e}  of {len(d)} tokens")
    print(f"choices that differ: {disagreement(trainer, batch):.2%}")


def main() -> None:
    """Generate, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("engine", choices=["hf", "sglang"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the engine")
    parser.add_argument("--trained", default="bfloat16", choices=["float32", "bfloat16"], help="of the trainer")
    parser.add_argument("--prompts", type=int, default=2000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model") if chosen.model == "random" else chosen.model
        reference = ModelReference(model, chosen.dtype)
        batch = asyncio.run(generated(chosen.engine, reference, chosen.prompts, Path(folder) / "logs"))
        compare(batch, ModelReference(model, chosen.trained))


if __name__ == "__main__":
    main()
