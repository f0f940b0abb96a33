"""Which experts a true SGLang server sent each token through, against transformers, and over a weight update."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_core.engines import ModelReference, WeightUpdate
from areal_core.errors import RunError
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

# Starting a server takes a minute, and a first run makes its environment.
pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]
HANG_S = 600
TOKENS = 400


def make_moe(folder, seed):
    """Three layers of eight experts."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


def differing(model, tokens, column):
    """The share of what is told that transformers does not choose, whatever the order."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    own = torch.stack([each.topk(2).indices for each in logits], 1)[:-1] + 1
    assert column.shape == (len(tokens), 3, 2)
    assert not column[0].any(), "nothing predicts the first"
    return float((own.sort(-1).values != torch.from_numpy(column[1:]).long().sort(-1).values).float().mean())


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute"])
def test_a_server_tells_the_experts_of_every_token(mode, sglang_program, sglang_options, server_environment, tmp_path):
    models = [make_moe(tmp_path / str(seed), seed) for seed in range(2)]
    settings = SGLangConfig(
        program=sglang_program, options=sglang_options, environment=server_environment, servers=1, stream_interval=4,
        start_timeout_s=900.0, update_mode=mode, routed_experts=True,
    )  # fmt: skip

    def asked(name, count):
        sampling = SamplingParameters(max_new_tokens=count)
        return [GenerationRequest(f"{name}-{i}", [5 + i, 6, 7], sampling, i) for i in range(4)]

    async def work():
        model = ModelReference(str(tmp_path / "0"), "float32")
        engine = ServerFleet(SGLangAdapter(settings), tmp_path / "logs")
        try:
            await engine.start(model)
            first = await asyncio.gather(*map(engine.generate, asked("first", 20)))
            late = [asyncio.ensure_future(engine.generate(one)) for one in asked("late", TOKENS)]
            await asyncio.sleep(1.0)
            await engine.update_weights(WeightUpdate(1, tmp_path / "1"))
            return first, await asyncio.gather(*late)
        finally:
            await engine.close()

    first, late = asyncio.run(asyncio.wait_for(work(), HANG_S))
    for number, found in enumerate(first):
        assert differing(models[0], [5 + number, 6, 7, *found.output_ids], found.columns["routed_experts"]) < 0.01
    for number, found in enumerate(late):
        tokens = [5 + number, 6, 7, *found.output_ids]
        assert set(found.versions) == {0, 1}
        # What a rebuilt cache went through: SGLang keeps nothing of what was there before.
        assert differing(models[1], tokens, found.columns["routed_experts"]) < 0.01
        assert differing(models[0], tokens, found.columns["routed_experts"]) > 0.1


def test_a_model_without_experts_is_refused_before_a_server_starts(tmp_path, sglang_program):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    engine = ServerFleet(SGLangAdapter(SGLangConfig(program=sglang_program, routed_experts=True)), tmp_path / "logs")
    with pytest.raises(RunError, match="model type qwen3 has no routers whose choices are known"):
        asyncio.run(engine.start(ModelReference(str(tmp_path))))
    assert not (tmp_path / "logs").exists()
