"""Each family is trained exactly and generated from, on the rung and by the way that docs/reference/models.md names."""

import logging

import models_page
import pytest
import small_models
import torch
import transformers
import write_models
from transformers import AutoModelForCausalLM
from transformers.models.mamba import modeling_mamba

from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_fsdp.models import convolutions, mixers
from areal_fsdp.models.probe import Rung, choose_rung
from areal_fsdp.parallel.tensor import decoder_layers
from areal_hf.server import load_model
from areal_hf.ways import Way, choose_way

PAGE = models_page.read()
PACKED_CONVOLUTION = convolutions.packed_convolution
FAST = ("qwen3", "qwen3_5_text", "llama4_text", "gemma2", "phi3")
OF_THE_PAGE = transformers.__version__ == models_page.versions()["transformers"]
"""Whether this is the transformers that the page was made with."""
LADDER = ("packed", "mixers", "rows", "refused")
MIXERS = sorted(family for family, row in PAGE.items() if row.train.text == "mixers")
EVERY = small_models.by_tier(small_models.FAMILIES, FAST)


@pytest.mark.parametrize("family", EVERY)
def test_values_gradients_and_export_are_those_of_transformers(family, tmp_path):
    rung, why = small_models.measure(family, tmp_path)
    wanted = PAGE[family].train
    if OF_THE_PAGE:
        assert (rung, models_page.plain(why)) == wanted
    else:  # another version may compute a family in a way that can be packed
        assert LADDER.index(rung) <= LADDER.index(wanted.text)


@pytest.mark.parametrize("family", EVERY)
def test_the_embedded_engine_takes_the_way_of_the_page(family, tmp_path):
    small_models.make_model(family, tmp_path)
    choice = choose_way(load_model(ModelReference(str(tmp_path)), "cpu"), write_models.LONGEST)
    assert choice.way == PAGE[family].embedded.text if OF_THE_PAGE else choice.way is not Way.REFUSED


def test_the_page_has_all_families():
    assert PAGE.keys() == small_models.FAMILIES.keys()
    assert models_page.read(models_page.page(PAGE, models_page.versions())) == PAGE


@pytest.mark.parametrize("family", small_models.by_tier(MIXERS, FAST))
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


def test_a_leak_that_no_tolerance_would_show_is_seen(tmp_path, monkeypatch):
    """In bfloat16 a probe may be off by 0.2, and these convolutions look back by a ten-thousandth."""
    monkeypatch.setattr(convolutions, "packed_convolution", _convolution_across_sequences)
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


def _convolution_across_sequences(hidden, weight, bias, seq_idx):
    return PACKED_CONVOLUTION(hidden, weight, bias, torch.zeros_like(seq_idx))


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


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_with_two_attentions_each_are_found(tmp_path, layers):
    """LongCat-Flash counts attentions as layers, and each of its layers has lists of two modules."""
    small_models.make_model("longcat_flash", tmp_path, num_hidden_layers=layers, num_layers=layers // 2)
    model = small_models.load(tmp_path)
    assert model.config.num_hidden_layers == layers
    assert decoder_layers(model) is model.model.layers


def test_a_model_that_looks_one_token_ahead_is_refused_in_half_precision_too(tmp_path, monkeypatch):
    """Four of five tokens of a sequence have no part in it, so that no median shows it."""
    own = modeling_mamba.MambaMixer.forward

    def ahead(self, hidden, *arguments, **named):
        later = torch.nn.functional.pad(hidden, (0, 0, 0, 1))[:, 1:]
        return own(self, hidden + 0.3 * later, *arguments, **named)

    monkeypatch.setattr(modeling_mamba.MambaMixer, "forward", ahead)
    small_models.make_model("mamba", tmp_path)
    with pytest.raises(RunError, match="its tokens see later ones"):
        small_models.set_up(tmp_path, dtype="bfloat16")
