"""What a model stores beside its parameters reaches the embedded engine with them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.training.weights_file import describe_weights, write_weights
from areal_hf.weights import WeightLoader

SPECIFICATION = importlib.util.spec_from_file_location("small_models", Path(__file__).with_name("small_models.py"))
small_models = sys.modules["small_models"] = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(small_models)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "apertus", "ernie4_5_moe"])
def test_a_server_takes_over_all_that_is_synced(family, dtype, tmp_path):
    small_models.make_model(family, tmp_path / "model")
    engine = small_models.set_up(tmp_path / "model", dtype)
    (tmp_path / "synced").mkdir()
    write_weights(tmp_path / "synced" / "model.safetensors", describe_weights(engine), engine.named_full_parameters())
    engine.close()
    server = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype)).requires_grad_(False)
    wanted = {name: tensor.clone() for name, tensor in server.state_dict().items()}
    for tensor in server.state_dict().values():
        tensor.zero_()
    WeightLoader(server).load(tmp_path / "synced")
    for name, tensor in server.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
