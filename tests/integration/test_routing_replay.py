"""Routing replay from the engine that generates to the one that trains: the same experts, nearer log-probabilities."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_core.config import resolve
from areal_core.data import PackedBatch, Trajectory, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import ConfigError
from areal_core.sdk import ACTOR
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
EXAMPLE = Path(__file__).parents[2] / "examples/moe.yaml"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An MoE, and the same with every weight a little off, as rounding or an update leave it."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=24, num_experts=16, num_experts_per_tok=4, max_position_embeddings=96,
        norm_topk_prob=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    made = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("off")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
        model.save_pretrained(made[0])
        for parameter in model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
        model.save_pretrained(made[1])
    return made


def generated(folder: Path, logs: Path) -> PackedBatch:
    """What the embedded engine writes to a few prompts, as training reads it."""

    async def work() -> list[Trajectory]:
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", routed_experts=True)), logs)
        await engine.start(ModelReference(str(folder)))
        sampling = SamplingParameters(max_new_tokens=40)
        asked = [GenerationRequest(str(i), [1 + i, 5, 7 + i], sampling, i) for i in range(12)]
        try:
            made = await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), PATIENCE_S)
        finally:
            await engine.close()
        return [Trajectory.from_generation(a.input_ids, m) for a, m in zip(asked, made, strict=True)]

    return shift_to_predictions(PackedBatch.from_trajectories(asyncio.run(work())))


def trainer(folder: Path) -> FSDPEngine:
    engine = FSDPEngine(FSDPConfig())
    engine.setup(ModelReference(str(folder)), ACTOR, OptimizerSettings(10, 1.0))
    return engine


def test_replay_brings_the_trainer_nearer_to_the_engine(folders: tuple[Path, Path], tmp_path: Path) -> None:
    own, off = folders
    batch = PackedBatch.from_bytes(generated(own, tmp_path).to_bytes())
    assert batch["routed_experts"].shape == (batch.token_count, 3, 4)
    without = batch.with_tokens(routed_experts=torch.zeros_like(batch["routed_experts"]))
    mask = batch["loss_mask"]

    def difference(folder: Path, part: PackedBatch) -> float:
        found = trainer(folder).forward(part, ["logprobs"])["logprobs"]
        return float((found - batch["logprobs"])[mask].abs().mean())

    assert difference(own, batch) < 1e-4
    assert difference(own, without) < 1e-4, "engine and trainer choose alike with the same weights"
    replayed, routed = difference(off, batch), difference(off, without)
    assert replayed < 0.8 * routed, (replayed, routed)


def test_a_training_engine_that_cannot_replay_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    chosen = {"type": "deepspeed/deepspeed", "config": str(tmp_path / "zero.json"), "learning_rate": 1e-4}
    engines = f"train_engine={json.dumps(chosen)}", "inference_engine.routed_experts=true"
    with pytest.raises(ConfigError, match="deepspeed/deepspeed does not go through the same experts again"):
        resolve(EXAMPLE, ["deepspeed"], engines)
    assert resolve(EXAMPLE, [], engines[1:]).config.inference_engine.settings.routed_experts
