"""An adapter with default settings trains what PEFT trains, on each family, or is refused with the reason."""

import logging

import adapters
import models_page
import pytest
import small_models
import torch
from safetensors import safe_open

from areal_core.errors import RunError
from areal_fsdp.lora.adapter import install
from areal_fsdp.lora.settings import LoraSettings

FAST = ("qwen3_moe", "lfm2", "longcat_flash")
EVERY = small_models.by_tier(small_models.FAMILIES, FAST)
PAGE = models_page.read()
READ_PAST = {"falcon_mamba": "dt_proj", "jamba": "dt_proj", "mamba": "dt_proj"}
"""Families whose mixers read a matrix's weight and never call its layer."""


@pytest.mark.parametrize("family", EVERY)
def test_values_gradients_and_files_are_those_of_peft(family, tmp_path):
    kinds, note = adapters.measure(family, tmp_path)
    if family in READ_PAST:
        assert kinds == []
        assert f"computes without calling the layers {READ_PAST[family]}, " in note
    else:
        assert len(kinds) >= 1
    assert models_page.adapter_cell(kinds, note) == PAGE[family].adapter


@pytest.mark.parametrize("family", ["jamba", pytest.param("mamba", marks=pytest.mark.slow)])
def test_an_adapter_that_the_model_reads_past_is_refused_and_the_hint_works(family, tmp_path):
    small_models.make_model(family, tmp_path)
    with pytest.raises(RunError, match="so their adapters would have no effect") as caught:
        small_models.set_up(tmp_path, adapter={"rank": 2})
    names = caught.value.hints[0].removeprefix("set modules: [").removesuffix("]").split(", ")
    small_models.set_up(tmp_path, adapter={"rank": 2, "modules": names}).close()


@pytest.mark.parametrize(
    ("family", "adapted", "frozen"),
    [
        ("mixtral", "k_proj, o_proj, q_proj, v_proj", "MixtralExperts, MixtralTopKRouter"),
        ("granitemoeshared", "input_linear, k_proj, o_proj, output_linear, q_proj, v_proj", "GraniteMoeSharedExperts"),
        ("deepseek_v3", "kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj", "DeepseekV3Experts"),
        ("afmoe", "k_proj, o_proj, q_proj, v_proj", "AfmoeExperts, down_proj, gate, gate_proj, up_proj"),
        ("qwen3_5_text", "down_proj, gate_proj, in_proj_a, in_proj_b, ", "Conv1d"),
        ("mamba2", "in_proj", "Conv1d, out_proj"),
    ],
)
def test_one_line_names_what_all_linear_leaves_frozen(family, adapted, frozen, tmp_path, caplog):
    small_models.make_model(family, tmp_path)
    model = small_models.load(tmp_path)
    with caplog.at_level(logging.WARNING, "areal_fsdp"):
        install(model, LoraSettings(rank=2), source="", learns=True)
    (line,) = [record.message for record in caplog.records]
    assert f"the adapter is on {adapted}" in line
    assert f"frozen in its layers are {frozen}" in line


@pytest.mark.parametrize(
    ("family", "modules", "words"),
    [
        ("deepseek_v3", ["up_proj"], r"PEFT puts no adapter on up_proj of model type deepseek_v3: .*fused"),
        ("deepseek_v3", ["down_proj"], r"PEFT puts no adapter on down_proj .*takes the name for that of experts"),
        ("falcon_h1", ["out_proj"], "PEFT puts no adapter on out_proj .*incompatible with Mamba-based models"),
        ("qwen2_moe", ["shared_expert_gate"], "are matrices beside the experts"),
        ("deepseek_v4", ["o_a_proj"], "no matrix in the model's layers is called o_a_proj"),
    ],
)
def test_named_matrices_that_cannot_have_an_adapter_are_refused(family, modules, words, tmp_path):
    small_models.make_model(family, tmp_path)
    with pytest.raises(RunError, match=words):
        install(small_models.load(tmp_path), LoraSettings(rank=2, modules=modules), source="", learns=True)


def test_an_adapter_on_a_moe_continues_from_its_export(tmp_path):
    """Its files name matrices beside experts, which a config may not name."""
    small_models.make_model("granitemoeshared", tmp_path / "model")
    engine = small_models.set_up(tmp_path / "model", adapter={"rank": 2})
    with torch.no_grad():
        for parameter in engine._parameters.values():
            parameter.normal_(std=0.3)
    batch = small_models.make_batch()
    wanted = engine.forward(batch, ["logprobs"])["logprobs"]
    engine.export(tmp_path / "export")
    again = small_models.set_up(tmp_path / "model", adapter={"from_folder": tmp_path / "export" / "adapter"})
    torch.testing.assert_close(again.forward(batch, ["logprobs"])["logprobs"], wanted)


@pytest.mark.parametrize("family", ["nemotron_h", "kimi_linear", pytest.param("deepseek_v4", marks=pytest.mark.slow)])
def test_servers_get_an_adapter_under_the_names_of_the_models_files(family, tmp_path):
    """transformers renames these while it loads them."""
    small_models.make_model(family, tmp_path)
    model = small_models.load(tmp_path)
    adapter = install(model, LoraSettings(rank=2, sync="alone"), source="", learns=True)
    names = {name.rpartition(".lora_")[0] for name, _ in adapter.alone(torch.detach)}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {f"{name.removeprefix('base_model.model.')}.weight" for name in names} < set(file.keys())
    assert names != {f"base_model.model.{name.removesuffix('.weight')}" for name in adapter.layers}
