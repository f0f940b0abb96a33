"""A model with a recurrent state learns with the embedded engine, and both engines agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Workplace

pytestmark = pytest.mark.nightly


@pytest.fixture
def hybrid(workplace: Workplace) -> Path:
    """A tiny Qwen3.5 with the tokenizer of the tiny model."""
    folder = workplace.folder / "hybrid"
    tokenizer = AutoTokenizer.from_pretrained(workplace.folder / "model")
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_learns_and_its_engines_agree(workplace: Workplace, hybrid: Path) -> None:
    words = ["rollout.max_staleness=0", "weight_sync.logprob_check_every=1", "run_dir=run"]
    outcome = workplace.areal("run", "run.yaml", f"model.path={hybrid}", *words)
    assert outcome.code == 0, outcome.err
    steps = workplace.metrics()
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line["train/behavior_difference"] < 1e-4
        assert line["logprob_check/difference_max"] < 1e-4
        assert line["train/gradient_norm"] > 0
    assert workplace.weights() != (hybrid / "model.safetensors").read_bytes()
    log = (workplace.folder / "run" / "logs" / "server-0.log").read_text()
    assert "model type 'qwen3_5_text': requests of one length are computed together, with transformers' own" in log


@pytest.mark.parametrize("transport", ["memory", "disk"])
def test_tensors_that_transformers_does_not_read_are_in_no_weight_sync(workplace: Workplace, transport: str) -> None:
    """Layers of multi-token prediction, in the files of Qwen3.5 and DeepSeek-V3 and in no class of transformers."""
    file = workplace.folder / "model" / "model.safetensors"
    left = {"mtp.fc.weight": torch.ones(4, 4), "model.layers.9.eh_proj.weight": torch.ones(2)}
    save_file(load_file(file) | left, file, {"format": "pt"})
    outcome = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2", f"weight_sync.transport={transport}")
    assert outcome.code == 0, outcome.err
    exported = load_file(workplace.folder / "run" / "model" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in left.items())
