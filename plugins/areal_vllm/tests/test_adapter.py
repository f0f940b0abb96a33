"""Test the adapter's requests to a vLLM server, and how it reads recorded answers."""

import copy
import json
from base64 import b64encode
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from areal_core.engines import ModelReference
from areal_core.inference.adapter import PartialGeneration
from areal_core.inference.errors import RequestRefusedError, ServerRefusedError, UpdateRefusedError
from areal_core.models.experts import MoEShape
from areal_core.servers import SamplingParameters, ServerLostError
from areal_vllm.adapter import WORKER, VLLMAdapter
from areal_vllm.config import VLLMConfig

SCRATCH = Path("/scratch")
GENERATE = "/inference/v1/generate"
SERVER_INFO = "/server_info"


def adapter(**settings):
    return VLLMAdapter(VLLMConfig(**settings))


def partial(prompt=(5, 17, 33, 8), **sampling):
    return PartialGeneration("r1.1", list(prompt), SamplingParameters(**sampling), 3, "0")


def generated(adapter_call, answers, request=None, **settings):
    async def collect(connection):
        return [chunk async for chunk in adapter(**settings).generate(connection, request or partial())]

    return adapter_call(answers, collect)


def with_config(recorded, **changes):
    """Return the recorded answers with some values of `vllm_config` changed."""
    answers = copy.deepcopy(recorded)
    for path, value in changes.items():
        group, key = path.split("__")
        answers[SERVER_INFO]["vllm_config"][group][key] = value
    return answers


def test_options_become_arguments_of_the_command():
    options = {"max_model_len": 512, "enforce_eager": True, "enable_prefix_caching": False, "stream_interval": 4}
    settings = {"program": ["/a/python", "-m", "server"], "options": options, "environment": {"A": "1"}}
    command = adapter(**settings).command(ModelReference("/model", "bfloat16"), "127.0.0.1", 8000, SCRATCH)
    arguments = list(command.arguments)
    assert arguments[:3] == ["/a/python", "-m", "server"]
    assert arguments[arguments.index("--max-model-len") + 1] == "512"
    assert arguments[arguments.index("--model") + 1] == "/model"
    assert arguments[arguments.index("--dtype") + 1] == "bfloat16"
    assert "--enforce-eager" in arguments
    assert "--enable-prefix-caching" not in arguments
    assert arguments.count("--stream-interval") == 1
    assert arguments[arguments.index("--stream-interval") + 1] == "4", "options of the config replace the adapter's own"
    assert command.environment["A"] == "1"
    assert str(WORKER) in command.environment["PYTHONPATH"]
    assert list(WORKER.glob("*.py")), "the server imports its worker extension from this folder"


def test_the_key_is_not_on_the_command_line(monkeypatch):
    monkeypatch.setenv("KEY", "it is secret")
    command = adapter(api_key="env:KEY").command(ModelReference("/model", "float32"), "127.0.0.1", 8000, SCRATCH)
    assert not any("secret" in word or "key" in word for word in command.arguments)
    assert command.environment["VLLM_API_KEY"] == "it is secret"


def test_a_server_is_identified(adapter_call, recorded):
    identity, _ = adapter_call(recorded, adapter().identify)
    assert (identity.version, identity.context, identity.slots, identity.dtype) == ("0.32.0", 16384, 32, "float32")
    assert identity.ranks == 1
    assert identity.reports_spans


def test_an_unknown_version_is_refused_unless_allowed(adapter_call, recorded):
    answers = {**recorded, "/version": {"version": "0.99.1"}}
    with pytest.raises(ServerRefusedError, match=r"is vLLM 0\.99\.1.*allow_unknown_version"):
        adapter_call(answers, adapter().identify)
    identity, _ = adapter_call(answers, adapter(allow_unknown_version=True).identify)
    assert identity.version == "0.99.1"


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/version": {"version": "what you like"}},
        {"/version": ["0.32.0"]},
        {"/version": {"version": "0.32.0"}, "/v1/models": {"data": []}},
    ],
    ids=["nothing there", "no version", "a list", "no model"],
)
def test_other_servers_are_refused(adapter_call, answers):
    with pytest.raises(ServerRefusedError, match="answers, but not as a vLLM server does"):
        adapter_call(answers, adapter().identify)


def test_a_server_without_weight_updates_is_refused(adapter_call, recorded):
    answers = {path: value for path, value in recorded.items() if path != SERVER_INFO}
    with pytest.raises(ServerRefusedError, match="VLLM_SERVER_DEV_MODE"):
        adapter_call(answers, adapter().identify)


def test_a_server_with_untempered_logprobs_is_refused(adapter_call, recorded):
    answers = with_config(recorded, model_config__logprobs_mode="raw_logprobs")
    with pytest.raises(ServerRefusedError, match="--logprobs-mode processed_logprobs"):
        adapter_call(answers, adapter().identify)


def test_stop_strings_need_detokenize():
    assert "stop" not in adapter().capabilities().sampling
    assert "stop" in adapter(detokenize=True).capabilities().sampling
    arguments = list(
        adapter(detokenize=True).command(ModelReference("/model", "float32"), "127.0.0.1", 8000, SCRATCH).arguments
    )
    assert "--skip-tokenizer-init" not in arguments


def test_a_recorded_answer_is_read(adapter_call, recorded):
    events = recorded[GENERATE]["events"]
    chunks, (body,) = generated(adapter_call, recorded)
    choices = [choice for event in events for choice in event["choices"]]
    assert [chunk.output_ids for chunk in chunks] == [choice["token_ids"] for choice in choices]
    logprobs = [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in choices]
    assert [chunk.logprobs for chunk in chunks] == logprobs
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    spans = chunks[-1].spans
    assert [label for label, _, _ in spans] == ["0", "1"], "one update happened during the recording"
    assert spans[0][2] == spans[1][1]
    assert spans[1][2] == sum(len(chunk.output_ids) for chunk in chunks)
    assert (body["request_id"], body["token_ids"], body["cache_salt"]) == ("r1.1", [5, 17, 33, 8], "0")


def test_sampling_parameters_are_those_of_vllm(adapter_call, recorded):
    request = partial(max_new_tokens=7, min_new_tokens=2, stop_token_ids=(4, 9), top_k=3)
    _, (body,) = generated(adapter_call, recorded, request)
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"], sampling["top_k"]) == (7, 2, 3)
    assert sampling["stop_token_ids"] == [4, 9]
    assert sampling["ignore_eos"], "only the request's stop tokens end it"


def answer_with(*tops):
    """An answer of one token for each list of likeliest tokens, as vLLM writes it: the sampled one is the first."""
    listed = [[{"token_id": token, "logprob": value, "rank": None} for token, value in top] for top in tops]
    content = [{**top[0], "top_logprobs": top} for top in listed]
    choice = {"finish_reason": "length", "weight_versions": None, "token_ids": [top[0]["token_id"] for top in listed]}
    return {GENERATE: {"events": [{"choices": [{**choice, "logprobs": {"content": content}}]}]}}


def test_likeliest_tokens_are_those_without_a_sampled_one_that_is_none(adapter_call):
    """One more is requested, because vLLM lists the sampled token first and leaves out the last."""
    request = partial(max_new_tokens=3, top_logprobs=2)
    likely = [(7, -1.5), (3, -0.5), (4, -2.0)]  # the sampled token is the second of three
    unlikely = [(9, -6.0), (3, -0.5), (4, -2.0)]  # and here it is none of the likeliest
    (chunk,), (body,) = generated(adapter_call, answer_with(likely, unlikely), request)
    assert body["sampling_params"]["logprobs"] == 3
    assert (chunk.output_ids, chunk.logprobs) == ([7, 9], [-1.5, -6.0])
    assert (chunk.top_ids, chunk.top_logprobs) == ([3, 7, 3, 4], [-0.5, -1.5, -0.5, -2.0])
    (chunk,), (body,) = generated(adapter_call, answer_with(likely[:1]))
    assert body["sampling_params"]["logprobs"] == 0
    assert (chunk.top_ids, chunk.top_logprobs, chunk.prompt_logprobs) == ([], [], [])
    assert "prompt_logprobs" not in body["sampling_params"]


def test_another_number_of_likeliest_tokens_is_a_lost_server(adapter_call):
    with pytest.raises(ServerLostError, match="sent 2 likeliest tokens where 3 were asked for"):
        generated(adapter_call, answer_with([(7, -1.5), (3, -0.5)]), partial(top_logprobs=2))


def test_log_probabilities_of_the_prompt_come_with_a_whole_answer(adapter_call):
    """vLLM does not stream them. The first token has none, and the entry of each other token names only itself."""
    entries = [{"17": {"logprob": -2.5, "rank": 9}}, {"33": {"logprob": -1.5}}, {"8": {"logprob": -0.5}}]
    ((event,),) = [answer["events"] for answer in answer_with([(7, -1.0)]).values()]
    answers = {GENERATE: event | {"prompt_logprobs": [None, *entries]}}
    (chunk,), (body,) = generated(adapter_call, answers, partial(prompt_logprobs=True))
    assert (chunk.output_ids, chunk.finish, chunk.prompt_logprobs) == ([7], "length", [-2.5, -1.5, -0.5])
    assert (body["stream"], body["sampling_params"]["prompt_logprobs"]) == (False, 0)


def test_a_whole_answer_of_another_form_is_a_lost_server(adapter_call):
    with pytest.raises(ServerLostError, match="unknown form"):
        generated(adapter_call, {GENERATE: {"choices": [{"token_ids": "7"}]}}, partial(prompt_logprobs=True))


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [(0, {}, {}), (19, {}, {}), (20, {}, {"max_logprobs": 21}), (64, {"max-logprobs": 100}, {"max-logprobs": 100})],
)
def test_servers_of_a_run_accept_as_many_as_it_needs(count, options, expected):
    config = SimpleNamespace(sampling=SimpleNamespace(top_logprobs=count))
    assert VLLMConfig(options=options).for_run(config).options == expected


def test_greedy_with_a_temperature_is_refused_before_it_is_sent(adapter_call, recorded):
    with pytest.raises(ValueError, match="greedy"):
        generated(adapter_call, recorded, partial(greedy=True, temperature=0.7))


def test_an_error_in_a_stream_is_a_lost_server(adapter_call, recorded):
    broken = {"events": [*recorded[GENERATE]["events"][:1], {"error": {"message": "the engine died", "code": 500}}]}
    with pytest.raises(ServerLostError, match="the engine died"):
        generated(adapter_call, {GENERATE: broken})


def test_errors_contain_no_token_ids(adapter_call, recorded):
    prompt = [31337, 31338]
    for status in (400, 500):
        with pytest.raises((RequestRefusedError, ServerLostError)) as caught:
            generated(adapter_call, {GENERATE: (status, recorded["validation error"])}, partial(prompt))
        assert "valid integer" in str(caught.value)
        assert "3133" not in str(caught.value)
    nonsense = (200, json.dumps(prompt) * 3)
    with pytest.raises(ServerLostError) as caught:
        generated(adapter_call, {GENERATE: nonsense}, partial(prompt))
    assert "3133" not in str(caught.value)


@pytest.mark.parametrize("mode", ["recompute", "keep_cache"])
def test_weights_are_loaded_from_a_folder(adapter_call, mode, tmp_path):
    paths = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    answers = {**{path: {"message": "done"} for path in paths}, "/reset_prefix_cache": {"success": True}}
    _, bodies = adapter_call(answers, lambda connection: adapter().load(connection, tmp_path, "3", mode))
    assert bodies[1] == {"update_info": {"folder": str(tmp_path)}}
    assert bodies[2] == {"weight_version": "3"}
    # The server puts live requests back into the queue, or keeps its cache.
    assert bodies[3:] == ([{"reset_running_requests": "true"}] if mode == "recompute" else [])


def test_a_pause_keeps_the_cache(adapter_call):
    """By default vLLM empties its cache at every pause, which would make `keep_cache` the same as `recompute`."""
    stop = adapter().stop
    _, bodies = adapter_call({"/pause": {"status": "paused"}}, lambda connection: stop(connection, "keep_cache"))
    assert bodies == [{"mode": "keep", "clear_cache": "false"}]


def test_refused_weights_raise(adapter_call, tmp_path):
    answers = {"/start_weight_update": {}, "/update_weights": (400, {"error": {"message": "no such tensor"}})}
    with pytest.raises(UpdateRefusedError, match="no such tensor"):
        adapter_call(answers, lambda connection: adapter().load(connection, tmp_path, "3", "recompute"))


def test_servers_with_adapter_rank_allocate_adapters():
    command = adapter(adapter_rank=20).command(ModelReference("/model", "bfloat16"), "127.0.0.1", 8000, SCRATCH)
    arguments = list(command.arguments)
    assert "--enable-lora" in arguments
    assert arguments[arguments.index("--max-lora-rank") + 1] == "32", "vLLM supports only some ranks"
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in adapter().command(ModelReference("/model"), "127.0.0.1", 8000, SCRATCH).arguments


def test_a_server_with_a_lower_adapter_rank_is_refused(adapter_call, recorded):
    with pytest.raises(ServerRefusedError, match="takes adapters of rank 0 at most, but adapter_rank is 8"):
        adapter_call(recorded, adapter(adapter_rank=8).identify)
    answers = copy.deepcopy(recorded)
    answers[SERVER_INFO]["vllm_config"]["lora_config"] = {"max_lora_rank": 8}
    identity, _ = adapter_call(answers, adapter(adapter_rank=8).identify)
    assert not identity.reports_spans, "its label is the base model's: requests must end before a new adapter"


def test_a_new_adapter_replaces_the_old_one_and_requests_name_it(adapter_call, recorded, tmp_path):
    """Weights of a whole model make the server unload its adapter, and requests name none."""
    prefix = "base_model.model.model.layers.0.self_attn"
    tensors = {f"{prefix}.{part}_proj.lora_A.weight": torch.zeros(3, 8) for part in "qv"}
    tensors |= {f"{prefix}.{part}_proj.lora_B.weight": torch.zeros(8, 3) for part in "qv"}
    folder, whole = tmp_path / "adapter", tmp_path / "whole"
    for target, content in ((folder, tensors), (whole, {"model.norm.weight": torch.zeros(8)})):
        target.mkdir()
        save_file(content, target / "model.safetensors")
    answers = copy.deepcopy(recorded) | {"/v1/load_lora_adapter": "ok", "/v1/unload_lora_adapter": "ok"}
    answers |= {f"/{route}": {} for route in ("start_weight_update", "update_weights", "finish_weight_update")}
    answers["/reset_prefix_cache"] = {"success": True}
    answers["/v1/models"]["data"].append({"id": "areal"})
    served = adapter(adapter_rank=8)

    async def load_and_generate(connection):
        chunks = []
        for source in (folder, whole):
            await served.load(connection, source, "1", "recompute")
            request = replace(partial(), adapter=served.name_of(connection))
            chunks += [chunk async for chunk in served.generate(connection, request)]
        return chunks

    chunks, bodies = adapter_call(answers, load_and_generate)
    unloaded, loaded, generated, unloaded_again, *updated, generated_again = bodies
    assert unloaded == unloaded_again == {"lora_name": "areal"}
    assert loaded == {"lora_name": "areal", "lora_path": str(folder)}
    assert generated["model"] == "areal"
    assert "model" not in generated_again
    assert {"update_info": {"folder": str(whole)}} in updated
    assert all(chunk.spans is None for chunk in chunks)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 3, ["q_proj", "v_proj"])
    assert (folder / "adapter_model.safetensors").is_file()


def test_routed_experts_are_read(adapter_call, recorded):
    """Routed experts are a numpy file in base64, as `vllm/utils/serial_utils.py` writes it. The test makes them up."""
    served = adapter(routed_experts=True)
    served.moe = MoEShape(depth=3, layers=(0, 2), experts=8, choices=2)
    answers = copy.deepcopy(recorded)
    last = answers[GENERATE]["events"][-1]["choices"][0]
    assert last["finish_reason"]
    known = 103  # tokens of the prompt and the recorded answer without the last
    choices = np.arange(known * 3 * 2, dtype=np.int64).reshape(known, 3, 2).astype(np.uint8) % 8
    with BytesIO() as file:
        np.save(file, choices, allow_pickle=False)
        last["routed_experts"] = b64encode(file.getbuffer()).decode()

    async def collect(connection):
        return [chunk async for chunk in served.generate(connection, partial())]

    chunks, _ = adapter_call(answers, collect)
    assert [bool(chunk.columns) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    column = chunks[-1].columns["routed_experts"]
    assert not column[0].any(), "no token predicts the first"
    assert column[1:].tolist() == (choices[:, [0, 2]] + 1).tolist()


def test_a_server_that_reports_no_routed_experts_is_refused(adapter_call, recorded):
    served = adapter(routed_experts=True)
    arguments = list(served.command(ModelReference("/model", "float32"), "127.0.0.1", 8000, SCRATCH).arguments)
    assert "--enable-return-routed-experts" in arguments
    with pytest.raises(ServerRefusedError, match="start it with --enable-return-routed-experts"):
        adapter_call(recorded, served.identify)
    answers = copy.deepcopy(recorded)
    answers[SERVER_INFO]["vllm_config"]["aux_output_config"] = {"enable_return_routed_experts": True}
    assert adapter_call(answers, served.identify)[0].version == "0.32.0"
