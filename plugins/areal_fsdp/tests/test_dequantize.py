"""Quantized folders in the published formats: engines refuse them, and a command writes them in bfloat16."""

import json
import re
from argparse import ArgumentParser

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Mxfp4Config

from areal_core.cli.commands import dequantize
from areal_core.disk import read_shapes
from areal_core.engines import ModelReference
from areal_core.errors import RunError, UsageError
from areal_core.models.quantization import plain_shapes
from areal_core.sdk import ACTOR, REFERENCE
from areal_fsdp.models.model import load_model

SIZES = {
    "vocab_size": 62,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of MXFP4 by their code (OCP Microscaling Formats 1.0, section 5.3.3)."""
BLOCK = 128


def main(words):
    """Run the command."""
    parser = ArgumentParser()
    dequantize.add_arguments(parser)
    return dequantize.execute(parser.parse_args(words))


def in_fp8(weight):
    """Return codes, scales and values of a weight in DeepSeek-V3's format: a scale for each block of 128 x 128."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales, codes = torch.zeros(rows, columns), torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = weight[place] / scales[row, column]
    codes = codes.to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return codes, scales, codes.float() * spread


def in_mxfp4(weight):
    """Return codes, exponents and values of [experts, in, out] in gpt-oss's format: two codes a byte, blocks of 32."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = (groups / exponents.exp2()[..., None])[..., None].sub(FP4).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    whole = (FP4[codes] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    return blocks, (exponents + 127).to(torch.uint8), whole


def make_fp8(weights):
    quantized, whole = {}, {}
    for name, value in weights.items():
        if re.search(r"_proj(_with_mqa)?\.weight", name):
            codes, scales, plain = in_fp8(value)
            quantized |= {name: codes, f"{name}_scale_inv": scales}
            whole[name] = plain.bfloat16()
        else:
            quantized[name] = whole[name] = value if "e_score" in name else value.bfloat16()
    return quantized, whole


def make_mxfp4(weights):
    quantized, whole = {}, {}
    for name, value in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            quantized[f"{name}_blocks"], quantized[f"{name}_scales"], plain = in_mxfp4(value)
            whole[name] = plain.bfloat16()
        else:
            quantized[name] = whole[name] = value.bfloat16()
    return quantized, whole


KINDS = {
    "fp8": (
        lambda: DeepseekV3Config(
            **SIZES,
            hidden_size=192,
            intermediate_size=160,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
        ),
        make_fp8,
        {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "mxfp4": (
        lambda: GptOssConfig(
            **SIZES, hidden_size=64, intermediate_size=32, num_key_value_heads=2, head_dim=16, num_local_experts=4
        ),
        make_mxfp4,
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]},
    ),
}


@pytest.fixture(params=KINDS)
def quantized(request, tmp_path):
    """Return a quantized folder and its weights, by the names of a folder that is not quantized."""
    make_config, make, settings = KINDS[request.param]
    torch.manual_seed(3)
    folder = tmp_path / "quantized"
    AutoModelForCausalLM.from_config(make_config()).save_pretrained(folder)
    weights = {n: torch.randn_like(w) / w.shape[-1] ** 0.5 for n, w in load_file(folder / "model.safetensors").items()}
    weights["mtp.layers.0.down_proj.weight"] = torch.randn(160, 144)  # which no class of transformers reads
    stored, whole = make(weights)
    (folder / "model.safetensors").unlink()
    names = sorted(stored, key=lambda name: (name.endswith("_scale_inv"), name))  # a matrix and its factors stand apart
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        save_file({name: stored[name].contiguous() for name in part}, file, metadata={"format": "pt"})
    places = {name: f"model-{1 + (n >= half):05}-of-00002.safetensors" for n, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": request.param, **settings}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, whole


@pytest.mark.parametrize("role", [ACTOR, REFERENCE])
def test_engines_refuse_quantized_weights(quantized, role):
    folder, _ = quantized
    with pytest.raises(RunError, match="are quantized") as refused:
        load_model(ModelReference(str(folder), "bfloat16"), role)
    assert refused.value.hints[0].startswith(f"write it in bfloat16 once, areal dequantize {folder} ")


def test_dequantized_weights_are_written_in_bfloat16(quantized, make_engine, tmp_path):
    folder, whole = quantized
    target = tmp_path / "plain"
    assert main([str(folder), str(target)]) == 0
    found = {}
    for file in target.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    engine = make_engine(target, dtype="bfloat16")
    assert whole.keys() - dict(engine.named_full_parameters()).keys() == {"mtp.layers.0.down_proj.weight"}
    engine.export(tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == whole.keys()
    with pytest.raises(UsageError, match="exists already"):
        main([str(folder), str(target)])
    with pytest.raises(RunError, match="are not quantized"):
        main([str(target), str(tmp_path / "again")])


@pytest.mark.parametrize("quantized", ["mxfp4"], indirect=True)
def test_mxfp4_is_dequantized_as_in_transformers(quantized):
    folder, whole = quantized
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_tensors_that_do_not_fit_are_named_and_no_folder_is_left(quantized, tmp_path):
    folder, _ = quantized
    file = folder / "model-00002-of-00002.safetensors"
    stored = load_file(file)
    suffix = ("_scale_inv", "_scales")
    name = next(name for name in stored if name.endswith(suffix))
    save_file(stored | {name: torch.cat([stored[name]] * 2, -1)}, file)
    with pytest.raises(RunError, match=r"the tensor '.*(does not go with|is not in MXFP4)"):
        main([str(folder), str(tmp_path / "plain")])
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_methods_name_the_folder_that_was_quantized(quantized, method, tmp_path):
    folder, _ = quantized
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="are quantized") as refused:
        load_model(ModelReference(str(folder), "bfloat16"), ACTOR)
    assert refused.value.hints == ("name the folder of the model in bfloat16 that was quantized",)
    with pytest.raises(RunError, match=f"are quantized by {method}"):
        main([str(folder), str(tmp_path / "plain")])


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_one_file_and_another_that_is_not_the_model(quantized, name, tmp_path):
    folder, whole = quantized
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
        file.unlink()
    save_file(stored, folder / name, metadata={"format": "pt"})
    save_file({"tok_embeddings.weight": torch.zeros(3, 3)}, folder / "consolidated.safetensors")
    index = folder / "model.safetensors.index.json"
    index.unlink()
    if name != "model.safetensors":
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(stored, name)}))
    target = tmp_path / "plain"
    (tmp_path / ".plain.new").mkdir()
    (tmp_path / ".plain.new" / "half.safetensors").touch()  # a killed call left it
    assert main([str(folder), str(target)]) == 0
    assert [path.name for path in tmp_path.glob("*plain*")] == ["plain"]
    assert not (target / "half.safetensors").exists()
    assert not (target / "consolidated.safetensors").exists()
    assert load_file(target / name).keys() == whole.keys()
    _, loading = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, output_loading_info=True)
    assert not loading["missing_keys"]


def test_parameters_are_counted_without_reading_them(quantized):
    folder, whole = quantized
    description = json.loads((folder / "config.json").read_text())
    shapes = plain_shapes(description, read_shapes(folder))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}


def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(RunError, match=r"it has no config\.json"):
        main([str(tmp_path / "adapter"), str(tmp_path / "out")])
    with pytest.raises(RunError, match="there is no folder 'no/where', and the hub does not give it"):
        main(["no/where", str(tmp_path / "out")])
