"""Test the adapter's requests to an SGLang server, and how it reads recorded answers."""

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from areal_core.engines import ModelReference, TensorDescription
from areal_core.inference.adapter import PartialGeneration, WeightGroup
from areal_core.inference.errors import RequestRefusedError, ServerRefusedError, UpdateRefusedError
from areal_core.models.experts import MoEShape
from areal_core.servers import SamplingParameters, ServerLostError
from areal_sglang import graphs
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

SCRATCH = Path("/scratch")


def adapter(**settings):
    return SGLangAdapter(SGLangConfig(**settings))


def partial(prompt=(5, 17, 33, 8), **sampling):
    return PartialGeneration("r1.1", list(prompt), SamplingParameters(**sampling), 3, "0")


def generated(adapter_call, answer, request=None, **settings):
    async def collect(connection):
        return [chunk async for chunk in adapter(**settings).generate(connection, request or partial())]

    return adapter_call({"/generate": answer}, collect)


def server_info(recorded, **changes):
    return {"/server_info": recorded["/server_info"] | changes}


def test_options_become_arguments_of_the_command():
    options = {"mem_fraction_static": 0.5, "disable_cuda_graph": True, "enable_torch_compile": False, "tp_size": 2}
    settings = {"program": ["/a/python", "server.py"], "options": options, "environment": {"A": "1"}}
    command = adapter(**settings).command(ModelReference("/model", "bfloat16"), "127.0.0.1", 8000, SCRATCH)
    arguments = list(command.arguments)
    assert arguments[:2] == ["/a/python", "server.py"]
    assert arguments[arguments.index("--mem-fraction-static") + 1] == "0.5"
    assert arguments[arguments.index("--model-path") + 1] == "/model"
    assert arguments[arguments.index("--dtype") + 1] == "bfloat16"
    assert "--disable-cuda-graph" in arguments
    assert "--enable-torch-compile" not in arguments
    assert arguments.count("--tp-size") == 1
    assert arguments[arguments.index("--tp-size") + 1] == "2", "options of the config replace the adapter's own"
    assert command.environment["A"] == "1"


def prefill_graphs(**options):
    command = adapter(options=options).command(ModelReference("/model", "bfloat16"), "127.0.0.1", 8000, SCRATCH)
    arguments = list(command.arguments)
    assert arguments.count("--cuda-graph-bs-prefill") <= 1
    if "--cuda-graph-bs-prefill" not in arguments:
        return []
    sizes = arguments[arguments.index("--cuda-graph-bs-prefill") + 1 :]
    return [int(word) for word in itertools.takewhile(str.isdigit, sizes)]


def test_prefill_graphs_are_bounded_if_the_user_chooses_none():
    assert prefill_graphs() == prefill_graphs(**{"mem-fraction-static": 0.5}) == [32, 64, 128, 256, 512, 1024]
    assert prefill_graphs(chunked_prefill_size=512) == [32, 64, 128, 256, 512]
    assert prefill_graphs(**{"max-total-tokens": 16}) == [], "no size fits"
    assert prefill_graphs(chunked_prefill_size=-1) == prefill_graphs()
    assert prefill_graphs(**{"cuda-graph-bs-prefill": [256, 1024]}) == [256, 1024]
    for choice in graphs.CHOICES - {"cuda_graph_bs_prefill"}:
        assert prefill_graphs(**{choice: True}) == [], choice


def test_the_key_is_in_a_private_file_and_not_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("KEY", "it is 'secret'")
    command = adapter(api_key="env:KEY").command(ModelReference("/model", "float32"), "127.0.0.1", 8000, tmp_path)
    arguments = list(command.arguments)
    assert not any("secret" in word for word in [*arguments, *command.environment.values()])
    (file,) = tmp_path.iterdir()
    assert arguments[arguments.index("--config") + 1] == str(file)
    assert yaml.safe_load(file.read_text()) == {"api-key": "it is 'secret'"}
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_server_is_identified(adapter_call, recorded):
    identity, _ = adapter_call(server_info(recorded), adapter().identify)
    assert (identity.version, identity.context, identity.slots, identity.dtype) == ("0.5.23", 16384, 32, "float32")
    assert identity.ranks == 1
    assert identity.reports_spans


@pytest.mark.parametrize(
    ("mode", "without_overlap", "reports_spans"),
    [("recompute", False, True), ("keep_cache", False, False), ("keep_cache", None, False), ("keep_cache", True, True)],
)
def test_labels_of_the_overlap_scheduler_are_not_used_in_keep_cache(
    mode, without_overlap, reports_spans, adapter_call, recorded
):
    """The scheduler labels the tokens of one forward pass with the next version (seen with 0.5.23 on an H200)."""
    answers = server_info(recorded, disable_overlap_schedule=without_overlap)
    identity, _ = adapter_call(answers, adapter(update_mode=mode).identify)
    assert identity.reports_spans is reports_spans


def test_an_unknown_version_is_refused_unless_allowed(adapter_call, recorded):
    answers = server_info(recorded, version="0.9.9")
    with pytest.raises(ServerRefusedError, match=r"is SGLang 0\.9\.9.*allow_unknown_version"):
        adapter_call(answers, adapter().identify)
    identity, _ = adapter_call(answers, adapter(allow_unknown_version=True).identify)
    assert identity.version == "0.9.9"


@pytest.mark.parametrize(
    "answers",
    [{}, {"/server_info": {"vllm_config": {}}}, {"/server_info": ["0.5.23"]}, {"/server_info": {"version": "yes"}}],
    ids=["nothing there", "vLLM", "a list", "no version"],
)
def test_other_servers_are_refused(adapter_call, answers):
    with pytest.raises(ServerRefusedError, match="answers, but not as an SGLang server does"):
        adapter_call(answers, adapter().identify)


@pytest.mark.parametrize("mode", ["recompute", "keep_cache"])
def test_older_servers_do_not_label_tokens(adapter_call, recorded, mode):
    identity, _ = adapter_call(server_info(recorded, version="0.5.17"), adapter(update_mode=mode).identify)
    assert not identity.reports_spans, "requests must end before an update"


def test_slots_are_those_that_fit_into_the_servers_memory(adapter_call, recorded):
    answers = server_info(
        recorded, max_running_requests=None, internal_states=[{"effective_max_running_requests_per_dp": 7}]
    )
    identity, _ = adapter_call(answers, adapter().identify)
    assert identity.slots == 7


def test_stop_strings_need_detokenize():
    assert "stop" not in adapter().capabilities().sampling
    assert "stop" in adapter(detokenize=True).capabilities().sampling
    arguments = list(
        adapter(detokenize=True).command(ModelReference("/model", "float32"), "127.0.0.1", 8000, SCRATCH).arguments
    )
    assert "--skip-tokenizer-init" not in arguments


def test_seeds_count_only_in_the_deterministic_mode():
    assert not adapter().capabilities().seeded
    assert adapter(options={"enable_deterministic_inference": True}).capabilities().seeded


@pytest.mark.parametrize("streaming", ["incremental", "cumulative"])
def test_recorded_answers_are_read(adapter_call, recorded, streaming):
    """Cumulative events give the same chunks as incremental ones."""
    chunks, (body,) = generated(adapter_call, {"events": recorded[streaming]})
    counts = [event["meta_info"]["completion_tokens"] for event in recorded[streaming]]
    assert [len(chunk.output_ids) for chunk in chunks] == [
        after - before for before, after in zip([0, *counts], counts, strict=False)
    ]
    if streaming == "cumulative":
        last = recorded[streaming][-1]
        expected = last["output_ids"], [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]
    else:
        expected = (
            [token for event in recorded[streaming] for token in event["output_ids"]],
            [entry[0] for event in recorded[streaming] for entry in event["meta_info"]["output_token_logprobs"]],
        )
    assert [token for chunk in chunks for token in chunk.output_ids] == expected[0]
    assert [value for chunk in chunks for value in chunk.logprobs] == expected[1]
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    spans = chunks[-1].spans
    assert [label for label, _, _ in spans] == ["0", "1"], "one update happened during the recording"
    assert spans[0][2] == spans[1][1]
    assert spans[1][2] == counts[-1]
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("r1.1", [5, 17, 33, 8], "0")


@pytest.mark.parametrize("streaming", ["incremental", "cumulative"])
def test_likeliest_tokens_are_read(adapter_call, recorded, streaming):
    """Cumulative events repeat those of earlier tokens, too. Without a request for them, none is read."""
    events = []
    for event in recorded[streaming]:
        tops = [[[-0.5, token + 1, None], [-1.5, token, None]] for token in event["output_ids"]]
        events.append(event | {"meta_info": event["meta_info"] | {"output_top_logprobs": tops}})
    chunks, (body,) = generated(adapter_call, {"events": events}, partial(top_logprobs=2))
    assert body["top_logprobs_num"] == 2
    for chunk in chunks:
        assert chunk.top_ids == [top for token in chunk.output_ids for top in (token + 1, token)]
        assert chunk.top_logprobs == [-0.5, -1.5] * len(chunk.output_ids)
    chunks, (body,) = generated(adapter_call, {"events": events})
    assert "top_logprobs_num" not in body
    assert not any(chunk.top_ids or chunk.top_logprobs for chunk in chunks)


@pytest.mark.parametrize("streaming", ["incremental", "cumulative"])
def test_log_probabilities_of_the_prompt_are_read_once(adapter_call, recorded, streaming):
    """Each event repeats them, with null for the first token."""
    of_prompt = [[None, 5, None], [-2.5, 17, None], [-1.5, 33, None], [-0.5, 8, None]]
    events = [
        event | {"meta_info": event["meta_info"] | {"input_token_logprobs": of_prompt}} for event in recorded[streaming]
    ]
    chunks, (body,) = generated(adapter_call, {"events": events}, partial(max_new_tokens=100, prompt_logprobs=True))
    assert (body["logprob_start_len"], body["sampling_params"]["stream_interval"]) == (0, 100)
    assert [value for chunk in chunks for value in chunk.prompt_logprobs] == [-2.5, -1.5, -0.5]
    chunks, (body,) = generated(adapter_call, {"events": events})
    assert "logprob_start_len" not in body
    assert not any(chunk.prompt_logprobs for chunk in chunks)


def test_sampling_parameters_are_those_of_sglang(adapter_call, recorded):
    answer = {"events": recorded["incremental"]}
    request = partial(max_new_tokens=7, stop_token_ids=(4, 9))
    _, (body,) = generated(adapter_call, answer, request, stream_interval=5)
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["stop_token_ids"], sampling["stream_interval"]) == (7, [4, 9], 5)
    assert not sampling["ignore_eos"], "it would switch off the request's own stop tokens"
    _, (body,) = generated(adapter_call, answer, partial(greedy=True, temperature=0.7))
    assert body["sampling_params"]["ignore_eos"]
    assert body["sampling_params"]["temperature"] == 0.7, "log-probabilities are those of the temperature"
    assert body["sampling_params"]["top_p"] < 1e-6


def test_a_request_that_is_aborted_in_the_queue_continues(adapter_call):
    """Its length is missing. One that was put back into the queue has a token, and the log-probabilities of all."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    for ids, logprobs in (([], []), ([5], [[-0.5, 4, None], [-0.25, 5, None]])):
        meta = {"finish_reason": reason, "completion_tokens": len(logprobs), "output_token_logprobs": logprobs}
        chunks, _ = generated(adapter_call, {"events": [{"output_ids": ids, "meta_info": meta}]})
        assert [(chunk.output_ids, chunk.finish) for chunk in chunks] == [([], "abort")]


def test_a_stop_at_a_token_that_is_no_stop_token_continues(adapter_call, recorded):
    """SGLang also stops at the model's end-of-sequence token, after which the request must continue."""
    last = recorded["incremental"][-1]
    ended = last | {"meta_info": last["meta_info"] | {"finish_reason": {"type": "stop", "matched": 2}}}
    events = {"events": [*recorded["incremental"][:-1], ended]}
    chunks, _ = generated(adapter_call, events, partial(stop_token_ids=(4,)))
    assert chunks[-1].finish == "abort"
    chunks, _ = generated(adapter_call, events, partial(stop_token_ids=(4, 2)))
    assert chunks[-1].finish == "stop"


def test_a_refusal_in_a_stream_raises(adapter_call, recorded):
    with pytest.raises(RequestRefusedError, match="longer than the model's context length"):
        generated(adapter_call, {"events": [recorded["refusal in a stream"]]})


def test_errors_contain_no_token_ids(adapter_call, recorded):
    """The server's error repeats the request."""
    prompt = [31337, 31338]
    for status in (400, 500):
        with pytest.raises((RequestRefusedError, ServerLostError)) as caught:
            generated(adapter_call, (status, recorded["validation error"]), partial(prompt))
        assert "validation error" in str(caught.value)
        assert "3133" not in str(caught.value)


@pytest.mark.parametrize(("mode", "flush"), [("recompute", True), ("keep_cache", False)])
def test_weights_are_loaded_from_a_folder(adapter_call, mode, flush, tmp_path):
    answers = {"/update_weights_from_disk": {"success": True, "message": "done"}}
    _, bodies = adapter_call(answers, lambda connection: adapter().load(connection, tmp_path, "3", mode))
    assert bodies == [{"model_path": str(tmp_path), "weight_version": "3", "flush_cache": flush}]


def test_refused_weights_raise(adapter_call, tmp_path):
    for answer in ({"success": False, "message": "no such tensor"}, (400, {"message": "no such tensor"})):
        with pytest.raises(UpdateRefusedError, match="no such tensor"):
            adapter_call(
                {"/update_weights_from_disk": answer},
                lambda connection: adapter().load(connection, tmp_path, "3", "recompute"),
            )


MOE = MoEShape(depth=2, layers=(0, 1), experts=4, choices=2)


def test_routed_experts_are_requested_and_read(adapter_call, recorded):
    """The recording has four prompt tokens and six new ones. In the second case, the first layer is dense."""
    for moe, layers in ((MOE, [0, 1]), (replace(MOE, layers=(1,)), [1])):
        served = adapter(routed_experts=True)
        served.moe = moe

        async def collect(connection, served=served):
            return [chunk async for chunk in served.generate(connection, partial())]

        chunks, (body,) = adapter_call({"/generate": {"events": recorded["of an MoE"]}}, collect)
        assert body["return_routed_experts"] is True
        assert [bool(chunk.columns) for chunk in chunks] == [False, False, True]
        column = chunks[-1].columns["routed_experts"]
        assert column.shape == (10, len(layers), 2)
        assert not column[0].any(), "no token predicts the first"
        expected = torch.tensor([[[0, 2], [0, 2]], [[3, 0], [2, 0]]])
        assert torch.equal(torch.tensor(column[1:3]).long(), expected[:, layers] + 1)
    chunks, (body,) = generated(adapter_call, {"events": recorded["of an MoE"]})
    assert not chunks[-1].columns
    assert "return_routed_experts" not in body


def test_routed_experts_of_another_model_raise(adapter_call, recorded):
    served = adapter(routed_experts=True)
    for moe in (replace(MOE, depth=5, layers=(0,)), replace(MOE, experts=3)):
        served.moe = moe

        async def collect(connection):
            return [chunk async for chunk in served.generate(connection, partial())]

        with pytest.raises(ValueError, match="experts"):
            adapter_call({"/generate": {"events": recorded["of an MoE"]}}, collect)


def test_a_server_that_reports_no_routed_experts_is_refused(adapter_call, recorded):
    served = adapter(routed_experts=True)
    arguments = list(served.command(ModelReference("/model", "float32"), "127.0.0.1", 8000, SCRATCH).arguments)
    assert "--enable-return-routed-experts" in arguments
    with pytest.raises(ServerRefusedError, match="start it with --enable-return-routed-experts"):
        adapter_call(server_info(recorded), served.identify)
    identity, _ = adapter_call(server_info(recorded, enable_return_routed_experts=True), served.identify)
    assert identity.version == "0.5.23"


def test_a_server_with_several_http_processes_is_refused(adapter_call, recorded):
    """Its update would wait forever for requests that another process has paused (seen on GPUs)."""
    with pytest.raises(ServerRefusedError, match="without --tokenizer-worker-num"):
        adapter_call(server_info(recorded, tokenizer_worker_num=4), adapter().identify)
    identity, _ = adapter_call(server_info(recorded, tokenizer_worker_num=1), adapter().identify)
    assert identity.version == "0.5.23"


def test_servers_with_adapter_rank_allocate_adapters(adapter_call, recorded):
    served = adapter(adapter_rank=20)
    arguments = list(served.command(ModelReference("/model", "bfloat16"), "127.0.0.1", 8000, SCRATCH).arguments)
    assert "--enable-lora" in arguments
    assert arguments[arguments.index("--max-lora-rank") + 1] == "20"
    assert arguments[arguments.index("--lora-target-modules") + 1 :][:2] == ["q_proj", "k_proj"]
    assert not served.capabilities().transports
    for changes in ({}, {"enable_lora": True, "max_lora_rank": 8}, {"max_lora_rank": 32}):
        with pytest.raises(ServerRefusedError, match=r"takes adapters of rank [08] at most, but adapter_rank is 20"):
            adapter_call(server_info(recorded, **changes), served.identify)
    identity, _ = adapter_call(server_info(recorded, enable_lora=True, max_lora_rank=20), served.identify)
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
    routes = ("load_lora_adapter", "unload_lora_adapter", "update_weights_from_disk")
    answers = {f"/{route}": {"success": True} for route in routes} | {"/generate": {"events": recorded["incremental"]}}
    served = adapter(adapter_rank=8)

    async def load_and_generate(connection):
        chunks = []
        for source in (folder, whole):
            await served.load(connection, source, "1", "recompute")
            request = replace(partial(), adapter=served.name_of(connection))
            chunks += [chunk async for chunk in served.generate(connection, request)]
        return chunks

    chunks, (unloaded, loaded, generated, unloaded_again, updated, generated_again) = adapter_call(
        answers, load_and_generate
    )
    assert unloaded == unloaded_again == {"lora_name": "areal"}
    assert loaded == {"lora_name": "areal", "lora_path": str(folder)}
    assert generated["lora_path"] == "areal"
    assert "lora_path" not in generated_again
    assert updated["model_path"] == str(whole)
    assert all(chunk.spans is None for chunk in chunks), "the server's labels are the base model's"
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


def test_a_refused_adapter_raises(adapter_call, recorded, tmp_path):
    save_file({"a.lora_A.weight": torch.zeros(3, 8)}, tmp_path / "model.safetensors")
    answers = {"/load_lora_adapter": {"success": False, "error_message": "no room"}}
    with pytest.raises(UpdateRefusedError, match="/load_lora_adapter: no room"):
        adapter_call(answers, lambda connection: adapter(adapter_rank=8).load(connection, tmp_path, "1", "recompute"))


@pytest.mark.parametrize("refused", ["begin_weight_update", "update_weights_from_distributed", "end_weight_update"])
def test_a_broadcast_raises_if_any_of_its_requests_is_refused(adapter_call, refused):
    paths = ("begin_weight_update", "update_weights_from_distributed", "end_weight_update")
    answers = {f"/{path}": {"success": True, "message": ""} for path in paths}
    group = WeightGroup("group", "127.0.0.1", 1, 2, "gloo")
    weight = TensorDescription("weight", "bfloat16", (3, 4))

    def receive(connection):
        return adapter().receive(connection, group, [weight], "mark-1", "recompute")

    assert len(adapter_call(answers, receive)[1]) == 3
    with pytest.raises(UpdateRefusedError, match="weights are locked"):
        adapter_call({**answers, f"/{refused}": (400, {"message": "weights are locked"})}, receive)
    older = {path: answer for path, answer in answers.items() if "distributed" in path}
    assert adapter_call(older, receive)[1][1]["weight_version"] == "mark-1", (
        "older versions have no routes of begin and end"
    )


class OpenServer:
    """A server on which an update was begun and not ended, because it failed or its sender was killed."""

    def __init__(self):
        self.is_open, self.paths = True, []

    async def post(self, path, body, **_):
        self.paths.append(path)
        if path in ("/begin_weight_update", "/end_weight_update"):
            if self.is_open is (path == "/begin_weight_update"):
                raise RequestRefusedError("a weight-update session is already open")
            self.is_open = not self.is_open
        return {"success": True, "message": ""}


def test_an_update_that_was_not_ended_is_ended_before_the_next():
    server = OpenServer()
    group = WeightGroup("group", "127.0.0.1", 1, 2, "gloo")
    weight = TensorDescription("weight", "bfloat16", (3, 4))
    asyncio.run(adapter().receive(server, group, [weight], "mark-1", "recompute"))
    assert server.paths == [
        "/begin_weight_update",
        "/end_weight_update",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
    ]
    assert not server.is_open
