"""Which experts tokens went through while requests joined, left and met new weights, against a plain forward."""

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
    """[T, layers, choices], counted from 1, of transformers' own forward, without cache and company."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    return torch.stack([each.softmax(-1).topk(2).indices for each in logits], 1) + 1


def watch(here):
    """Collect the experts of every request that ends."""
    found, step = {}, here.scheduler.step

    def look():
        outputs = step()
        if outputs is not None:
            parts = outputs.experts.split(outputs.computed)
            found.update(zip(outputs.numbers, parts, strict=True))
        return outputs

    here.scheduler.step = look
    return found


def test_every_token_is_told_with_the_experts_that_it_went_through(bench, saved):
    folder = saved(MOE)
    here = bench(folder, requests=5, routed_experts=True)
    found, chance = watch(here), random.Random(2)
    for number in range(24):
        prompt = [chance.randrange(5, 48) for _ in range(chance.choice((1, 2, 9, 20)))]
        for sibling in range(2):
            here.add(prompt, 2 * number + sibling, max_new_tokens=chance.randint(1, 60), stop_token_ids=(3, 4))
        if chance.random() < 0.5:
            here.step()
    here.run()
    assert len(found) == 48
    model = bench.reference(folder)
    for number, experts in found.items():
        tokens = here.requests[number].input_ids + here.outputs[number][0]
        assert experts.dtype is torch.uint8
        assert torch.equal(experts.long(), choices(model, tokens)[:-1]), "all but the newest, which nobody computed"
    assert max(map(len, found.values())) > 32, "rows were widened"


def test_an_update_leaves_what_was_chosen_before_it(bench, saved, tmp_path):
    """The cache is rebuilt under new weights; tokens before the update were sampled by the choices of the old ones."""
    here = bench(saved(MOE), recompute=True, routed_experts=True)
    found = watch(here)
    for number in range(3):
        here.add([7, 8, 9 + number], number, max_new_tokens=12)
    for _ in range(5):
        here.step()
    other = bench.reference(saved(MOE))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    other.save_pretrained(tmp_path)
    here.scheduler.update_weights(1, tmp_path)
    here.run()
    for number, experts in found.items():
        prompt, (output, _, versions, _) = here.requests[number].input_ids, here.outputs[number]
        assert set(versions) == {0, 1}
        old, new = (choices(model, prompt + output)[:-1] for model in (bench.reference(saved(MOE)), other))
        before = len(prompt) - 1 + versions.index(1)
        assert torch.equal(experts.long(), torch.cat([old[:before], new[before:]]))
        assert not torch.equal(old[:before], new[:before])


def test_a_run_gets_them_with_each_generation(saved, tmp_path, bench):
    async def work():
        settings = HFConfig(device="cpu", routed_experts=True)
        engine = ServerFleet(HFAdapter(settings), tmp_path)
        await engine.start(ModelReference(str(saved(MOE))))
        try:
            sampling = SamplingParameters(max_new_tokens=7)
            asked = [GenerationRequest(str(i), [5, 6, 7 + i][: 1 + i], sampling, i) for i in range(3)]
            return asked, await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), 240)
        finally:
            await engine.close()

    model = bench.reference(saved(MOE))
    for request, generation in zip(*asyncio.run(work()), strict=True):
        tokens = request.input_ids + generation.output_ids
        column = generation.columns["routed_experts"]
        assert column.shape == (len(tokens), 2, 2)
        assert not column[0].any(), "nothing predicts the first"
        assert torch.equal(torch.from_numpy(column[1:]).long(), choices(model, tokens)[:-1])


def test_a_model_without_experts_is_refused_before_the_first_prompt(model_folder, tmp_path):
    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", routed_experts=True)), tmp_path)
        try:
            await engine.start(ModelReference(str(model_folder)))
        finally:
            await engine.close()

    with pytest.raises(RunError, match="model type qwen3 has no routers whose choices are known"):
        asyncio.run(work())


def test_experts_of_a_model_that_generates_in_cohorts_are_refused(bench, saved):
    with pytest.raises(RunError, match="routed_experts is set, and model type 'qwen3_moe' does not generate in rows"):
        bench(saved(MOE), routed_experts=True, way="cohorts")
