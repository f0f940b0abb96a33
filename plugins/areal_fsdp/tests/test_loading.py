"""Each rank reads only its shards: the bytes it reads, and the same values as one rank that reads the whole model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from areal_core.engines import ModelReference
from areal_core.sdk import ACTOR, CRITIC, REFERENCE
from areal_fsdp.models.model import load_model

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "loading_program.py"
ROLES = {role.name: role for role in (ACTOR, CRITIC, REFERENCE)}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "tied": Qwen3Config(**SIZES, vocab_size=128, tie_word_embeddings=True, pad_token_id=5),
    "biased": LlamaConfig(**SIZES, vocab_size=126, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "odd": MistralConfig(**SIZES, vocab_size=127, sliding_window=4),
}
CASES = {
    "data2": ("biased", 2, {}),
    "tensor2": ("tied", 2, {"parallel": {"tensor": 2}}),
    "tensor2-critic": ("odd", 2, {"parallel": {"tensor": 2}, "role": "critic"}),
    "critic": ("tied", 2, {"role": "critic"}),
    "frozen": ("odd", 2, {"role": "reference", "dtype": "bfloat16"}),
    "data2-tensor2": ("biased", 4, {"parallel": {"data": 2, "tensor": 2}}),
    "replicas2": ("tied", 4, {"parallel": {"replicas": 2}}),
    "tensor4-odd": ("odd", 4, {"parallel": {"tensor": 4}, "role": "reference", "dtype": "bfloat16"}),
}
NIGHTLY = ("replicas2", "tensor4-odd", "tensor2", "tensor2-critic", "critic", "frozen")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that makes a model's folder with several files. Large weights make the probe sensitive."""
    folders = {}

    def make(kind):
        if kind not in folders:
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(CONFIGS[kind])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(6)
            model.generation_config.max_length = 33
            folders[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind], max_shard_size="300KB")
        return folders[kind]

    return make


def on_ranks(count, model, folder, settings):
    """Set up an engine on `count` ranks, and return the measurements of each."""
    arguments = [str(folder / "store"), str(model), str(folder), json.dumps(settings)]
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(count), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]


def whole_model(folder, settings):
    """Return the model as one rank loads it."""
    role = ROLES[settings.get("role", "actor")]
    model, files = load_model(ModelReference(str(folder), settings.get("dtype", "float32")), role)
    assert files is None
    return model


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[pytest.mark.nightly] * (case in NIGHTLY)) for case in CASES]
)
def loaded(request, folder_of, tmp_path_factory):
    """Return the ranks' measurements, and the case's model, number of ranks and settings."""
    kind, count, settings = CASES[request.param]
    return on_ranks(count, folder_of(kind), tmp_path_factory.mktemp("ranks"), settings), kind, count, settings


def size_of(parameters):
    return sum(parameter.nbytes for parameter in parameters)


def kept_whole(model, tensor):
    """Return the parameters that tensor parallelism does not shard."""
    if tensor == 1:
        return []
    small = [
        p for name, p in model.named_parameters() if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
    ]
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings() if model.can_generate() else model.score
    whole = (
        {table, head.weight} if len(table) % tensor else {head.weight} - {table} if not model.can_generate() else set()
    )
    return [*small, *whole]


def test_a_rank_reads_and_holds_only_its_shards(loaded, folder_of):
    results, kind, count, settings = loaded
    model = whole_model(folder_of(kind), settings)
    parallel = settings.get("parallel", {})
    tensor, replicas = parallel.get("tensor", 1), parallel.get("replicas", 1)
    layer, size = size_of(model.base_model.layers[0].parameters()), size_of(model.parameters())
    assert size > 6 * layer, "a single layer must be a small part of the model"
    undivided = size_of(kept_whole(model, tensor))
    own = (size - undivided) * replicas / count + undivided * tensor * replicas / count
    padding = 4096  # of first dimensions that the number of ranks does not divide
    in_file = 2 if settings.get("dtype") == "bfloat16" else 1  # the files are float32
    tied = size_of({model.get_input_embeddings().weight}) if model.config.tie_word_embeddings else 0
    for rank, result in enumerate(results):
        assert (result["refusal"], result["log"]) == ("", [])
        assert result["shards"] <= own + padding
        assert result["most"] <= own + layer + padding
        probe = in_file * (size + tied) if tensor > 1 and rank == 0 else 0  # rank 0 streams the whole model
        assert sum(result["read"].values()) <= in_file * (own + padding) + probe
    new = size_of(model.score.parameters()) if not model.can_generate() else 0
    assert sum(sum(result["read"].values()) for result in results) >= in_file * (size - new)


def test_the_sharded_model_equals_the_one_that_one_rank_loads(loaded, folder_of):
    """Compare parameters, new heads and buffers bit by bit, dtypes, and the generation config."""
    results, kind, _, settings = loaded
    model = whole_model(folder_of(kind), settings)
    wanted, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert buffers, "rotary frequencies are in no file"
    for result in results:
        assert result["dtypes"] == {str(parameter.dtype) for parameter in wanted.values()}
        for found, true in ((result["parameters"], wanted), (result["buffers"], buffers)):
            assert found.keys() == true.keys()
            for name, tensor in true.items():
                torch.testing.assert_close(found[name], tensor.detach(), atol=0, rtol=0, msg=name)
        if model.can_generate():
            assert result["generation"] == model.generation_config.to_dict()
            assert result["generation"]["max_length"] == 33


def test_ranks_read_their_shards_of_a_base_with_an_adapter(folder_of, tmp_path):
    """The base has the model's dtype, only the adapter is float32, and nothing is read twice."""
    model = whole_model(folder_of("biased"), {"role": "reference", "dtype": "bfloat16"})
    layer, size = size_of(model.base_model.layers[0].parameters()), size_of(model.parameters())
    settings = {"dtype": "bfloat16", "adapter": {"rank": 2, "modules": ["q_proj", "up_proj"]}}
    for result in on_ranks(2, folder_of("biased"), tmp_path, settings):
        assert (result["refusal"], result["log"]) == ("", [])
        assert result["dtypes"] == {"torch.bfloat16", "torch.float32"}
        adapter = 8 * 2 * ((64 + 64) + (64 + 256)) * 4
        assert result["shards"] <= (size + adapter) / 2 + 4096
        assert result["most"] <= size / 2 + adapter + layer + 4096, "every rank initializes the whole adapter"
        assert sum(result["read"].values()) <= 2 * (size / 2 + 4096), "the files are float32"
        assert result["parameters"].keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["parameters"][name], parameter.detach(), atol=0, rtol=0)


@pytest.mark.nightly
def test_a_file_that_cannot_be_read_on_one_rank_fails_all(folder_of, tmp_path):
    results = on_ranks(2, folder_of("tied"), tmp_path, {"fails": 1})
    for result in results:
        assert f"the model '{folder_of('tied')}' cannot be loaded: " in result["refusal"]
        assert "the disk is gone" in result["refusal"]


@pytest.mark.nightly
def test_a_probe_that_fails_on_the_first_rank_fails_all(folder_of, tmp_path):
    first, second = on_ranks(2, folder_of("tied"), tmp_path, {"fails": 0, "parallel": {"tensor": 2}})
    assert "computing a probe with the undivided model type 'qwen3' failed" in first["refusal"]
    assert "the disk is gone" in first["refusal"]
    assert "failed on another rank" in second["refusal"]


@pytest.mark.nightly
def test_missing_weights_give_the_same_error_in_parts_as_whole(folder_of, tmp_path):
    from areal_core.errors import RunError

    model = AutoModelForCausalLM.from_pretrained(folder_of("biased"))
    weights = {name: value for name, value in model.state_dict().items() if "layers.3.mlp.up" not in name}
    model.save_pretrained(tmp_path / "model", state_dict=weights)
    with pytest.raises(RunError, match=r"lacks weights that a causal language model needs: model.layers.3") as wanted:
        whole_model(tmp_path / "model", {})
    for result in on_ranks(2, tmp_path / "model", tmp_path, {}):
        assert result["refusal"] == str(wanted.value)


@pytest.mark.nightly
def test_files_other_than_safetensors_are_read_whole_with_a_warning(folder_of, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder_of("tied"))
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    for result in on_ranks(2, tmp_path / "model", tmp_path, {"parallel": {"tensor": 2}}):
        assert result["refusal"] == ""
        assert len(result["log"]) == 1
        assert "Each rank reads the whole model" in result["log"][0]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["parameters"][name], parameter.detach(), atol=0, rtol=0)


@pytest.mark.nightly
def test_all_ranks_read_the_whole_model_if_one_cannot_read_it_in_parts(folder_of, tmp_path):
    model = whole_model(folder_of("biased"), {})
    results = on_ranks(2, folder_of("biased"), tmp_path, {"fails_in_parts": (1, "RuntimeError")})
    for result, cause in zip(results, ["another rank cannot read it in parts", "no such luck"], strict=True):
        assert result["refusal"] == ""
        assert result["log"] == [f"'{folder_of('biased')}': {cause}. Each rank reads the whole model into its memory"]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["parameters"][name], parameter.detach(), atol=0, rtol=0)


def test_a_loading_error_on_one_rank_fails_all(folder_of, tmp_path):
    first, second = on_ranks(2, folder_of("biased"), tmp_path, {"fails_in_parts": (1, "OSError")})
    prefix = f"the model '{folder_of('biased')}' cannot be loaded: "
    assert first["refusal"].startswith(f"{prefix}it failed on another rank")
    assert second["refusal"].startswith(f"{prefix}no such luck")
