"""Test recorded routed experts against a plain forward, with requests that join and leave and with weight updates."""

import asyncio
import random

import pytest
import torch

from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig

pytestmark = pytest.mark.slow
MOE = "qwen3_moe"


def choices(model, tokens):
    """Return [T, layers, choices], counted from 1, of transformers' own forward over one sequence, without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    return torch.stack([layer.softmax(-1).topk(2).indices for layer in logits], 1) + 1


def watch(runner):
    """Return a dictionary that collects the experts of every request that ends."""
    experts_by_request, step = {}, runner.scheduler.step

    def step_and_collect():
        outputs = step()
        if outputs is not None:
            parts = outputs.experts.split(outputs.computed)
            experts_by_request.update(zip(outputs.numbers, parts, strict=True))
        return outputs

    runner.scheduler.step = step_and_collect
    return experts_by_request


def test_the_experts_of_every_token_are_recorded(bench, saved):
    folder = saved(MOE)
    runner = bench(folder, requests=5, routed_experts=True)
    experts_by_request, rng = watch(runner), random.Random(2)
    for number in range(24):
        prompt = [rng.randrange(5, 48) for _ in range(rng.choice((1, 2, 9, 20)))]
        for sibling in range(2):
            runner.add(prompt, 2 * number + sibling, max_new_tokens=rng.randint(1, 60), stop_token_ids=(3, 4))
        if rng.random() < 0.5:
            runner.step()
    runner.run()
    assert len(experts_by_request) == 48
    model = bench.reference(folder)
    for number, experts in experts_by_request.items():
        tokens = runner.requests[number].input_ids + runner.outputs[number][0]
        assert experts.dtype is torch.uint8
        assert torch.equal(experts.long(), choices(model, tokens)[:-1]), (
            "all tokens but the newest, which is not computed"
        )
    assert max(map(len, experts_by_request.values())) > 32, "some rows are wider than at first"


def test_an_update_keeps_the_experts_of_earlier_tokens(bench, saved, tmp_path):
    """The cache is rebuilt with new weights, but tokens before the update were sampled with the old experts."""
    runner = bench(saved(MOE), recompute=True, routed_experts=True)
    experts_by_request = watch(runner)
    for number in range(3):
        runner.add([7, 8, 9 + number], number, max_new_tokens=12)
    for _ in range(5):
        runner.step()
    other = bench.reference(saved(MOE))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    other.save_pretrained(tmp_path)
    runner.scheduler.update_weights(1, tmp_path)
    runner.run()
    for number, experts in experts_by_request.items():
        prompt, (output, _, versions, _) = runner.requests[number].input_ids, runner.outputs[number]
        assert set(versions) == {0, 1}
        old, new = (choices(model, prompt + output)[:-1] for model in (bench.reference(saved(MOE)), other))
        before = len(prompt) - 1 + versions.index(1)
        assert torch.equal(experts.long(), torch.cat([old[:before], new[before:]]))
        assert not torch.equal(old[:before], new[:before])


def test_generations_contain_routed_experts(saved, tmp_path, bench):
    async def work():
        settings = HFConfig(device="cpu", routed_experts=True)
        engine = ServerFleet(HFAdapter(settings), tmp_path)
        await engine.start(ModelReference(str(saved(MOE))))
        try:
            sampling = SamplingParameters(max_new_tokens=7)
            requests = [GenerationRequest(str(i), [5, 6, 7 + i][: 1 + i], sampling, i) for i in range(3)]
            return requests, await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 240)
        finally:
            await engine.close()

    model = bench.reference(saved(MOE))
    for request, generation in zip(*asyncio.run(work()), strict=True):
        tokens = request.input_ids + generation.output_ids
        column = generation.columns["routed_experts"]
        assert column.shape == (len(tokens), 2, 2)
        assert not column[0].any(), "no token predicts the first"
        assert torch.equal(torch.from_numpy(column[1:]).long(), choices(model, tokens)[:-1])


def test_a_model_without_experts_is_refused_at_the_start(model_folder, tmp_path):
    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", routed_experts=True)), tmp_path)
        try:
            await engine.start(ModelReference(str(model_folder)))
        finally:
            await engine.close()

    with pytest.raises(RunError, match="model type qwen3 has no routers whose choices are known"):
        asyncio.run(work())


def test_routed_experts_are_refused_for_cohorts(bench, saved):
    with pytest.raises(RunError, match="routed_experts is set, but model type 'qwen3_moe' does not generate in rows"):
        bench(saved(MOE), routed_experts=True, way="cohorts")
