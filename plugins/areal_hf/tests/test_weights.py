import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.errors import RunError
from areal_hf.weights import WeightLoader


@pytest.fixture
def model(bench, model_folder):
    return bench(model_folder).model


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_refused(model, folder, *messages):
    before = snapshot(model)
    with pytest.raises(RunError) as caught:
        WeightLoader(model).load(folder)
    for message in messages:
        assert message in str(caught.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def write(folder, model_folder, change):
    tensors = load_file(model_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_all_tensors_are_loaded_in_place_and_tied_ones_stay_tied(model, other_folder):
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}
    WeightLoader(model).load(other_folder)
    synced = load_file(other_folder / "model.safetensors")
    assert "lm_head.weight" not in synced
    for name, value in model.state_dict().items():
        assert value.data_ptr() == addresses[name]
        assert torch.equal(value, synced["model.embed_tokens.weight" if name == "lm_head.weight" else name])


def test_a_tied_tensor_may_have_its_other_name(model, other_folder, tmp_path):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    WeightLoader(model).load(write(tmp_path, other_folder, rename))
    synced = load_file(other_folder / "model.safetensors")
    assert torch.equal(model.model.embed_tokens.weight, synced["model.embed_tokens.weight"])


def test_the_tensors_of_each_expert_are_loaded_into_joined_ones(bench, saved, tmp_path):
    moe, synced = bench(saved("qwen3_moe")).model, load_file(saved("qwen3_moe") / "model.safetensors")
    before = snapshot(moe)
    assert not before.keys() & {name for name in synced if ".experts." in name}
    changed = {name: value + 1 for name, value in synced.items()}
    save_file(changed, tmp_path / "model.safetensors")
    WeightLoader(moe).load(tmp_path)
    for name, value in moe.state_dict().items():
        torch.testing.assert_close(value, before[name] + 1, atol=0, rtol=0)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rows = moe.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[2, 24:]
    torch.testing.assert_close(rows, changed[name], atol=0, rtol=0)
    del changed[name]
    save_file(changed, tmp_path / "model.safetensors")
    assert_refused(moe, tmp_path, f"missing: {name}")


def test_other_floating_dtypes_are_converted(model, other_folder, tmp_path):
    def halve(tensors):
        tensors.update({name: value.bfloat16() for name, value in tensors.items()})

    WeightLoader(model).load(write(tmp_path, other_folder, halve))
    synced = load_file(other_folder / "model.safetensors")
    assert torch.equal(model.model.norm.weight, synced["model.norm.weight"].bfloat16().float())


def test_an_error_names_all_faults_and_the_model_keeps_its_weights(model, other_folder, tmp_path):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(3)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16, dtype=torch.int64)

    assert_refused(
        model, write(tmp_path, other_folder, spoil), "missing: model.norm.weight", "unexpected: model.extra.weight",
        "model.layers.1.mlp.up_proj.weight is float32 [2, 2]", "q_norm.weight is int64 [16]",
    )  # fmt: skip


@pytest.mark.parametrize("part", [0, 4, 300, 0.5, -1])
def test_an_incomplete_file_changes_nothing(model, other_folder, tmp_path, part):
    data = (other_folder / "model.safetensors").read_bytes()
    kept = int(part * len(data)) if isinstance(part, float) else part if part >= 0 else len(data) - 1
    (tmp_path / "model.safetensors").write_bytes(data[:kept])
    assert_refused(model, tmp_path, "cannot be read", "model.safetensors")


def test_a_missing_file_and_weights_of_another_family_are_refused(model, saved, tmp_path):
    assert_refused(model, tmp_path, "cannot be read")
    shutil.copy(saved("gpt2") / "model.safetensors", tmp_path / "model.safetensors")
    assert_refused(model, tmp_path, "missing: model.embed_tokens.weight", "more", "unexpected: transformer.h.0")
