"""An export contains the files of the published model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from areal_core.engines import ModelReference
from areal_fsdp.models.export import write_model
from areal_testing.conformance import make_model

QWEN = Qwen3_5TextConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    head_dim=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)


@pytest.mark.parametrize(
    "written", [{"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"eos_token_id": [2, 3], "num_beams": 0}, {}]
)
def test_the_published_generation_config_is_copied(tmp_path, written):
    """transformers refuses to save some of them, which would fail the export after a whole run."""
    source = make_model(tmp_path / "model")
    (source / "generation_config.json").write_text(json.dumps(written))
    model = AutoModelForCausalLM.from_pretrained(source)
    write_model(tmp_path / "out", model, ModelReference(str(source)), iter(model.state_dict().items()))
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == written
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == model.config.model_type


def test_published_keys_that_transformers_does_not_write_are_kept(tmp_path):
    """SGLang reads a Qwen3.5's `full_attention_interval`, which transformers writes as `layer_types`."""
    source, out = tmp_path / "model", tmp_path / "out"
    Qwen3_5ForCausalLM(QWEN).save_pretrained(source)
    published = json.loads((source / "config.json").read_text())
    del published["layer_types"]
    published |= {
        "full_attention_interval": 2,
        "quantization_config": {"quant_method": "fp8"},
        "torch_dtype": "float16",
    }
    (source / "config.json").write_text(json.dumps(published))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    write_model(out, model, ModelReference(str(source)), iter(model.state_dict().items()))
    written = json.loads((out / "config.json").read_text())
    assert written["full_attention_interval"] == 2
    assert "torch_dtype" not in written
    assert written["dtype"] == "float32"
    assert AutoConfig.from_pretrained(out).layer_types == ["linear_attention", "full_attention"] * 2


@pytest.mark.parametrize("others", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_weights_that_the_class_does_not_read_are_exported(others, tmp_path, caplog):
    """An example is multi-token prediction, also if the folder's config still describes quantized weights."""
    source, out = tmp_path / "model", tmp_path / "out"
    Qwen3_5ForCausalLM(QWEN).save_pretrained(source)
    unread = {"mtp.fc.weight": torch.rand(32, 64), "mtp.layers.0.mlp.up_proj.weight": torch.rand(48, 32)}
    save_file(load_file(source / "model.safetensors") | unread, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | others))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    write_model(out, model, ModelReference(str(source)), iter(model.state_dict().items()))
    written = load_file(out / "model.safetensors")
    assert {name for name in written if name.startswith("mtp.")} == unread.keys()
    for name, tensor in unread.items():
        assert torch.equal(written[name], tensor), name
    assert "the export lacks weights" not in caplog.text
