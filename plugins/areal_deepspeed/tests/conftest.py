import importlib.util
import sys
from pathlib import Path

import pytest

SIZES = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny model; weights are large enough that temperature and position matter."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def program():
    """The module that the ranks of `test_ranks.py` run, which also holds what all tests share: batch and loss."""
    path = Path(__file__).parent / "rank_program.py"
    specification = importlib.util.spec_from_file_location("areal_deepspeed_rank_program", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["areal_deepspeed_rank_program"] = module
    specification.loader.exec_module(module)
    return module
