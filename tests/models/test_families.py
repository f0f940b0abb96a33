"""Each family is trained exactly, on the rung that docs/reference/models.md names."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_fsdp.models import mixers
from areal_fsdp.models.probe import Rung, choose_rung

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "docs" / "reference"


def _load(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


small_models, models_page = _load(HERE / "small_models.py"), _load(REFERENCE / "models_page.py")
PAGE = models_page.rows_of((REFERENCE / "models.md").read_text())
FAST = ("qwen3", "qwen3_5_text", "llama4_text", "gemma2", "phi3")
MIXERS = sorted(family for family, (rung, _) in PAGE.items() if rung == "mixers")
EVERY = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in small_models.FAMILIES]


@pytest.mark.parametrize("family", EVERY)
def test_values_gradients_and_export_are_those_of_transformers(family, tmp_path):
    assert tuple(small_models.measure(family, tmp_path)) == PAGE[family]


def test_the_page_has_all_families():
    assert PAGE.keys() == small_models.FAMILIES.keys()


@pytest.mark.parametrize("family", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in MIXERS])
def test_without_rows_a_mixer_is_wrong_and_the_probe_sees_it(family, tmp_path, monkeypatch):
    small_models.make_model(family, tmp_path)
    batch = small_models.make_batch()
    engine = small_models.set_up(tmp_path)
    right = engine.forward(batch, ["logprobs"])["logprobs"]
    monkeypatch.setattr(mixers, "_in_rows", lambda own, layout, inputs, named: own(*inputs, **named))
    wrong = engine.forward(batch, ["logprobs"])["logprobs"]
    assert small_models.distance(wrong, right) > 100 * small_models.TOLERANCE
    choice = choose_rung(engine._module, torch.device("cpu"), torch.float32)
    engine.close()
    assert choice.rung is Rung.ROWS
    assert choice.reasons[1].startswith("mixers: tokens of packed sequences mix in")


def test_a_leak_that_no_tolerance_would_show_is_seen(tmp_path):
    """In bfloat16 a probe may be off by 0.2, and these convolutions look back by a ten-thousandth."""
    small_models.make_model("lfm2", tmp_path / "random")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "random")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv.conv.weight" in name:
                parameter[..., :-1] = 1e-4
    model.save_pretrained(tmp_path / "faint")
    engine = small_models.set_up(tmp_path / "faint", dtype="bfloat16")
    engine.close()
    assert engine._choice.reasons == ["packed: Lfm2ShortConv mixes tokens of packed sequences outside attention"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama4_text", {"attention_chunk_size": 4096, "floor_scale": 8192}),
        ("deepseek_v32", {"index_topk": 2048}),
        ("gemma2", {"attn_logit_softcapping": 1e4}),
    ],
)
def test_what_a_short_probe_does_not_reach_is_not_packed(tmp_path, family, changes):
    """Published models have chunks, indexers and caps that make no difference to a few tokens."""
    small_models.make_model(family, tmp_path, **changes)
    engine = small_models.set_up(tmp_path)
    engine.close()
    assert engine._choice.rung is Rung.ROWS


def test_a_residual_in_float32_meets_a_head_in_bfloat16(tmp_path):
    small_models.make_model("mamba2", tmp_path)
    engine = small_models.set_up(tmp_path, dtype="bfloat16")
    engine.close()
    assert engine._choice.rung is Rung.MIXERS


@pytest.mark.parametrize("window", [4, 4096])
def test_windows_are_packed_as_the_mask_has_them(tmp_path, window):
    small_models.make_model("mistral", tmp_path, sliding_window=window)
    engine = small_models.set_up(tmp_path)
    engine.close()
    assert engine._choice == (Rung.PACKED, [])


def test_the_rung_and_the_reason_are_logged(tmp_path, caplog):
    small_models.make_model("gemma2", tmp_path)
    with caplog.at_level(logging.INFO, "areal_fsdp"):
        small_models.set_up(tmp_path).close()
    (line,) = [record.message for record in caplog.records if record.name == "areal_fsdp.models.probe"]
    assert line.startswith(
        "model type 'gemma2': each sequence is a padded row, with attention 'eager', because packed: "
    )


def test_longrope_in_rows_is_each_sequence_alone(tmp_path):
    """As a batch, transformers gives short rows the frequencies of the longest."""
    small_models.make_model("phi3", tmp_path)
    batch = small_models.make_batch()
    wanted, _ = small_models.reference(tmp_path, batch)
    engine = small_models.set_up(tmp_path)
    engine._module.attend_by("sdpa")
    found = engine.forward(batch, ["logprobs"])["logprobs"]
    assert small_models.distance(found, wanted) < small_models.TOLERANCE
    for name in engine._module.rotary:  # as transformers has it
        del engine._module.model.get_submodule(name).forward
    shared = engine.forward(batch, ["logprobs"])["logprobs"]
    engine._module.attend_by("areal_packed")
    packed = engine.forward(batch, ["logprobs"])["logprobs"]
    engine.close()
    assert small_models.distance(shared, wanted) > 100 * small_models.TOLERANCE
    assert small_models.distance(packed, wanted) > 100 * small_models.TOLERANCE
