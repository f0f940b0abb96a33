"""A model is exported with the files that it came with."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from areal_core.interfaces import ModelReference
from areal_core.testing.conformance import make_model
from areal_fsdp.models.export import write_model


@pytest.mark.parametrize(
    "written", [{"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"eos_token_id": [2, 3], "num_beams": 0}, {}]
)
def test_a_generation_config_is_exported_as_it_is(tmp_path, written):
    """Also one that transformers would refuse to save: a run was trained to its end and then lost its export."""
    source = make_model(tmp_path / "model")
    (source / "generation_config.json").write_text(json.dumps(written))
    model = AutoModelForCausalLM.from_pretrained(source)
    write_model(tmp_path / "out", model, ModelReference(str(source)), iter(model.state_dict().items()))
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == written
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == model.config.model_type
