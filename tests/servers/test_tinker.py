"""Tinker clients whose samples come from true servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_grpo.demonstration.model import make_model

tinker = pytest.importorskip("tinker")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "areal_tinker" / "tests"))
pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_samples_have_the_log_probabilities_of_the_trainer(
    server, request, server_environment, server_tolerance, tmp_path
):
    from tinker import types
    from tinker_server import IDS, adam, datum, serving

    program, options = (request.getfixturevalue(f"{server}_{name}") for name in ("program", "options"))
    options = options | {"max_model_len" if server == "vllm" else "context_length": 256}
    engine = {"type": server, "program": program, "options": options, "environment": server_environment}
    words = ["model.dtype=float32", "inference_engine.health_timeout_s=120"]
    with serving(tmp_path, make_model(tmp_path / "model"), *words, engine=engine) as started:
        service = started.connect()
        client = service.create_lora_training_client(base_model=started.model, rank=4).result()
        base = service.create_sampling_client(base_model=started.model).result()
        samplers = []
        for _ in range(2):
            client.forward_backward([datum()], "cross_entropy")
            client.optim_step(adam(3e-2)).result()
            samplers.append(client.save_weights_and_get_sampling_client().result())
        settings = types.SamplingParams(max_tokens=12, temperature=1.0)
        prompt = types.ModelInput.from_ints(IDS[:4])
        for sampler in (base, samplers[1]):
            answer = sampler.sample(prompt, 3, settings, include_prompt_logprobs=True).result()
            fresh = service.create_lora_training_client(base_model=started.model, rank=4).result()
            for sequence in answer.sequences:
                data = [datum([*IDS[:4], *sequence.tokens])]
                judge = fresh if sampler is base else client
                found = judge.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
                assert [*answer.prompt_logprobs[1:], *sequence.logprobs] == pytest.approx(found, abs=server_tolerance)
        asked = [sampler.sample(prompt, 1, settings) for sampler in (samplers[0], base, samplers[1], base)]
        assert all(each.result().sequences for each in asked)
