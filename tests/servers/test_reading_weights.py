"""A true SGLang server reads weights where they lie. On a CPU a file stands in place of a GPU's memory, in the one
function of PyTorch that opens it; the request, SGLang's list of what it unpickles, and its loader are the real ones."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_core.engines import ModelReference, SharedMemory, SharedTensor, TensorDescription, WeightUpdate
from areal_core.errors import RunError
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]
HANG_S = 600


def make_model(folder, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


def shared(folder, name, value):
    """A tensor behind others in its memory, which is a file."""
    place = folder / name
    place.write_bytes(bytes(64) + bytes(12) + value.contiguous().numpy().tobytes())
    memory = SharedMemory(0, "GPU-1", str(place).encode().hex(), 76 + value.nbytes, 64, 3, "", 0)
    return SharedTensor(TensorDescription(name, "float32", tuple(value.shape)), (memory,))


def difference(model, prompt, found):
    tokens = torch.tensor([[*prompt, *found.output_ids]])
    with torch.no_grad():
        all_of_them = model(tokens).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    own = all_of_them.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return float((own - torch.tensor(found.logprobs)).abs().max())


@pytest.mark.nightly
def test_weights_are_read_in_parts(sglang_program, sglang_options, server_environment, tmp_path, monkeypatch):
    models = [make_model(tmp_path / str(seed), seed) for seed in range(2)]
    (tmp_path / "memory").mkdir()
    tensors = [shared(tmp_path / "memory", name, value) for name, value in models[1].state_dict().items()]
    settings = SGLangConfig(
        program=sglang_program, options=sglang_options, environment=server_environment, servers=1, stream_interval=4
    )

    async def nothing(_self, _connection):
        """A server on a CPU has no memory to give away."""

    monkeypatch.setattr("areal_sglang.adapter.SGLangAdapter.sleep", nothing)
    monkeypatch.setattr("areal_sglang.adapter.SGLangAdapter.wake_up", nothing)
    prompt = [5, 6, 7]
    asked = [GenerationRequest(f"r{n}", prompt, SamplingParameters(max_new_tokens=20), n) for n in range(2)]

    async def work():
        model = ModelReference(str(tmp_path / "0"), "float32")
        engine = ServerFleet(SGLangAdapter(settings), tmp_path / "logs", gpus=[0])
        try:
            await engine.start(model)
            first = await engine.generate(asked[0])
            for version in (1, 2):  # a server that is left in the middle of an update would refuse the next
                await engine.sleep()
                for part in ((), tensors[:7], tensors[7:]):
                    await engine.read_tensors(version, part)
                await engine.update_weights(WeightUpdate(version, None, tuple(one.tensor for one in tensors)))
            last = await engine.generate(asked[1])
            await engine.sleep()
            await engine.read_tensors(3, ())
            (tmp_path / "memory" / tensors[0].tensor.name).unlink()
            with pytest.raises(
                RunError, match="no server reads weights in GPU memory: server-0 did not read version 3"
            ):
                await engine.read_tensors(3, tensors[:7])  # SGLang does not survive memory that it cannot open
            return first, last
        finally:
            await engine.close()

    first, last = asyncio.run(asyncio.wait_for(work(), HANG_S))
    assert set(first.versions) == {0}
    assert difference(models[0], prompt, first) < 1e-3
    assert set(last.versions) == {2}
    assert difference(models[1], prompt, last) < 1e-3
    assert difference(models[0], prompt, last) > 0.1
