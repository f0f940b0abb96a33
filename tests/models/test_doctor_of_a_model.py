"""`areal doctor MODEL`: what areal can do with a folder, by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, LlamaConfig, LlamaForCausalLM

from areal_core.checks.model_folder import _as_text, check_weights

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def doctor(*words):
    """The exit code, the output, and what is written to stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "areal_core", "doctor", *map(str, words)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_folder_is_tried_as_it_is(tmp_path):
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=8)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    code, out, err = doctor(tmp_path, "--json")
    found = {one["check"]: (one["is_well"], one["found"]) for one in json.loads(out)}
    assert code == 0, (found, err)
    assert found["core/model"] == (
        True, "lfm2; architecture Lfm2ForCausalLM; context 64 tokens; not quantized",
    )  # fmt: skip
    assert "M parameters" in found["core/weights"][1]
    assert found["core/tokenizer"] == (True, "with a chat template, in chat_template.jinja")
    assert found["fsdp/train"] == (True, "in float32 and bfloat16: packed")
    assert found["fsdp/adapter"] == (
        True,
        "on in_proj, k_proj, out_proj, q_proj, v_proj, w1, w2, w3; frozen are Conv1d",
    )
    tensor, expert = found["fsdp/parallel"][1].split("; expert: ")
    assert tensor.startswith("tensor: no (model type lfm2 has no plan for it")
    assert expert.endswith("the model has none)")
    assert found["hf/generate"] == (
        True,
        "in float32 and bfloat16: cohorts, because rows: it has layers of type conv",
    )
    assert {"sglang/architecture", "vllm/architecture"} < found.keys()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_large_model_without_weights_is_tried_as_a_small_copy(tmp_path):
    config = LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    code, out, _ = doctor(tmp_path)
    lines = out.splitlines()
    how = "tried on a random copy of 8 layers and small sizes: "
    assert f"well   fsdp/train: {how}in float32 and bfloat16: packed" in lines
    assert f"well   fsdp/parallel: {how}tensor: yes; expert: no (train_engine.parallel.expert 2 divides" in out
    assert f"well   hf/generate: {how}in float32 and bfloat16: rows" in lines
    assert "WRONG  core/tokenizer: there are no tokenizer files: save one there with save_pretrained" in lines
    assert code == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "is not a model: the folder has no config.json"),
        ("{broken", "config.json cannot be read: Expecting property name"),
        ("[]", "config.json has no model_type"),
        ('{"vocab_size": 3}', "config.json has no model_type"),
    ],
)
def test_a_folder_that_is_no_model_is_one_error(tmp_path, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    code, out, err = doctor(tmp_path)
    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err


def test_a_folder_that_is_not_there_is_one_error(tmp_path):
    code, _, err = doctor(tmp_path / "nowhere")
    assert code == 1
    assert "there is no folder" in err
    code, _, err = doctor("organization/name")
    assert code == 1
    assert "cannot be downloaded from the Hugging Face hub" in err


@pytest.mark.slow
def test_an_unknown_type_and_code_of_its_own_are_named(tmp_path):
    description = {"model_type": "not_yet", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(description))
    (tmp_path / "modeling.py").write_text("raise SystemExit('it is not run')")
    code, out, _ = doctor(tmp_path, "--json")
    found = {one["check"]: (one["is_well"], one["found"]) for one in json.loads(out)}
    assert code == 1
    assert not found["core/model"][0]
    assert "it needs code of its own (AutoModelForCausalLM)" in found["core/model"][1]
    for check in ("fsdp/train", "hf/generate"):
        assert not found[check][0]
        assert found[check][1].startswith("refused: transformers")
        assert "not_yet" in found[check][1]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_that_cannot_be_tried_is_no_failure(tmp_path):
    Lfm2MoeConfig().save_pretrained(tmp_path)  # without kinds of layers, no class of transformers makes a model of it
    (tmp_path / "tokenizer.json").write_text("{}")
    code, out, _ = doctor(tmp_path)
    for check in ("fsdp/train", "fsdp/adapter", "fsdp/parallel", "hf/generate"):
        assert f"?      {check}: not tried: no small copy of model type 'lfm2_moe' computes (" in out
    assert "refused" not in out
    assert code == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_quantized_model_is_refused_at_every_size(tmp_path):
    quantization = {"quant_method": "mxfp4"}
    answers = []
    for folder, config in (("small", LlamaConfig(**SIZES)), ("large", LlamaConfig())):
        if folder == "small":
            LlamaForCausalLM(config).save_pretrained(tmp_path / folder)
        config.save_pretrained(tmp_path / folder)
        description = json.loads((tmp_path / folder / "config.json").read_text())
        description["quantization_config"] = quantization
        (tmp_path / folder / "config.json").write_text(json.dumps(description))
        code, out, _ = doctor(tmp_path / folder, "--json")
        found = {one["check"]: one["found"].replace(str(tmp_path / folder), "FOLDER") for one in json.loads(out)}
        assert code == 1
        answers.append([found["fsdp/train"], found["hf/generate"]])
    assert answers[0] == answers[1]
    for answer in answers[0]:
        assert answer.startswith("refused: the weights of 'FOLDER' are quantized (mxfp4)")
        assert answer.endswith("areal dequantize FOLDER NEW_FOLDER, and name that folder")


def test_parameters_of_a_quantized_model_are_not_its_bytes(tmp_path):
    shapes = {"mlp.down_proj_blocks": (4, 6, 2, 16), "mlp.down_proj_scales": (4, 6, 2), "mlp.down_proj_bias": (4, 6)}
    save_file({name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    for method, words in (("mxfp4", "0.00156 M parameters: "), ("gptq", "0.00 GiB in its files, packed by gptq")):
        description = {"model_type": "gpt_oss", "quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(description))
        assert check_weights(tmp_path).text.startswith(words)
    assert _as_text(9_410_000_000) == "9.41 B"
