"""Adapters that a true server takes by themselves, and whose tokens say their version."""

import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from areal_core.engines import ModelReference, WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance.models import FIRST_FORCED
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig

KINDS = {"sglang": (SGLangConfig, SGLangAdapter), "vllm": (VLLMConfig, VLLMAdapter)}
ON_A_CPU = {"sglang": {"lora_backend": "torch_native"}, "vllm": {}}
TOKENS, REQUESTS, VERSIONS = 192, 6, 4
LAYER = "model.layers.1.mlp.down_proj"


def make_base(folder):
    """A model that gives the token of version 0 whatever came before: all tokens lead to the first unit vector."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=16384, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.zero_()
        for version in range(VERSIONS + 1):
            model.lm_head.weight[FIRST_FORCED + version, version] = 10.0
    model.save_pretrained(folder)
    return model


def write_version(folder, model, version):
    """An adapter of one matrix that turns the hidden state to the unit vector of a version."""
    seen = []
    module = model.get_submodule(LAYER)
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    hook.remove()
    b = torch.zeros(64, 1)
    b[version, 0] = 100.0
    folder.mkdir()
    tensors = {"lora_A": (seen[0] / seen[0].square().sum())[None], "lora_B": b}
    named = {f"base_model.model.{LAYER}.{name}.weight": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


@pytest.fixture
def getfixture(request):
    """A fixture by its name."""
    return request.getfixturevalue


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_every_token_has_the_label_of_the_adapter_that_sampled_it(kind, getfixture, server_environment, tmp_path):
    """Requests that are under way while three adapters come, one after another, on a true server that then dies."""
    model = make_base(tmp_path / "model")
    folders = {version: write_version(tmp_path / f"v{version}", model, version) for version in range(1, VERSIONS)}
    config, adapter = KINDS[kind]
    program, options = (getfixture(f"{kind}_{name}") for name in ("program", "options"))
    settings = config(
        program=program, options=options | ON_A_CPU[kind], environment=server_environment, stream_interval=1,
        adapter_rank=1,
    )  # fmt: skip

    async def run():
        reference = ModelReference(str(tmp_path / "model"))
        engine = ServerFleet(adapter(settings), tmp_path / "logs")
        found = []

        async def ask(number):
            while not done.is_set():
                sampling = SamplingParameters(max_new_tokens=TOKENS)
                request = GenerationRequest(f"r{number}.{len(found)}", [5, 6, number + 7], sampling, number)
                found.append(await engine.generate(request))

        done = asyncio.Event()
        async with asyncio.timeout(1200):
            await engine.start(reference)
            try:
                asking = [asyncio.create_task(ask(number)) for number in range(REQUESTS)]
                for version in range(1, VERSIONS):
                    answered = len(found)
                    while len(found) < answered + 2:
                        await asyncio.sleep(0.01)
                        assert not any(task.done() for task in asking)
                    await engine.update_weights(WeightUpdate(version, folders[version]))
                # It is started again, as its base, and synced.
                os.killpg(engine._local.processes["server-0"].pid, signal.SIGKILL)
                answered = len(found)
                while len(found) < answered + REQUESTS:
                    await asyncio.sleep(0.01)
                    assert not any(task.done() for task in asking)
                done.set()
                await asyncio.gather(*asking)
            finally:
                await engine.close()
        return found

    found = asyncio.run(run())
    labels = [answer.versions for answer in found]
    assert {version for versions in labels for version in versions} == set(range(VERSIONS))
    assert any(len(set(versions)) > 1 for versions in labels), "no request was under way while an adapter came"
    for answer in found:
        assert answer.versions == sorted(answer.versions)
        assert answer.output_ids == [FIRST_FORCED + version for version in answer.versions]
        assert len(answer.output_ids) == TOKENS
