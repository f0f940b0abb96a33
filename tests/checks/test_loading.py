"""Models that engines and workers would refuse at setup are refused before the run, for every process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.checks.child import inspect
from areal_core.checks.loading import loading_problems
from areal_core.checks.preflight import preflight
from areal_core.config import Resolved, resolve
from areal_core.config.resolve import CONFIG_FILE
from areal_core.errors import ConfigError
from areal_core.runtime.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")
pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

SIZES = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
WORDS = ["model.source=null", "weight_sync.transport=memory", "evaluation=null"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama whose tokenizer is in vocab.json and merges.txt."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    characters = [chr(number) for number in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {word: number for number, word in enumerate(["<|endoftext|>", *characters])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def config_of(model: Path, *words: str) -> Resolved:
    return resolve(None, ["grpo"], [*WORDS, f"model.path={model}", *words])


def change(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_model_whose_weights_fit_has_no_problem(model: Path) -> None:
    assert list(loading_problems(config_of(model))) == []


def test_fewer_layers_than_the_config_names_are_a_problem(model: Path) -> None:
    change(model, num_hidden_layers=3)
    (problem,) = loading_problems(config_of(model))
    assert problem.startswith(f"model.path: the weights in '{model}' are not those of its config.json: 9 are missing, ")
    assert "model.layers.2.input_layernorm.weight" in problem


def test_weights_of_another_shape_are_a_problem(model: Path) -> None:
    change(model, intermediate_size=32)
    (problem,) = loading_problems(config_of(model))
    assert "6 have another shape, such as model.layers.0.mlp.down_proj.weight" in problem
    assert "which is [16, 24] and must be [16, 32]" in problem


def test_a_critic_may_lack_its_head_and_nothing_else(model: Path) -> None:
    words = ["algorithm=grpo/ppo"]
    assert list(loading_problems(config_of(model, *words))) == []
    change(model, num_hidden_layers=3)
    assert [problem.partition(":")[0] for problem in loading_problems(config_of(model, *words))] == ["model.path"] * 2


def test_an_unknown_type_of_model_is_a_problem(model: Path) -> None:
    change(model, model_type="not_yet")
    (problem,) = loading_problems(config_of(model))
    assert problem.startswith(f"model.path: transformers cannot load '{model}': ")
    assert "not_yet" in problem


def test_a_role_with_other_tokens_is_a_problem(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(other)
    for name in ("merges.txt", "tokenizer_config.json"):
        (other / name).write_text((model / name).read_text())
    vocabulary = json.loads((model / "vocab.json").read_text())
    (other / "vocab.json").write_text(json.dumps({word: 96 - number for word, number in vocabulary.items()}))
    words = ["algorithm.regularizers=[reference_kl]", f"roles.reference.path={other}"]
    (problem,) = loading_problems(config_of(model, *words))
    assert problem.startswith("roles.reference.path: role 'reference': the model")
    assert "has other tokens than" in problem


def test_a_missing_file_of_the_vocabulary_is_a_problem(model: Path, tmp_path: Path) -> None:
    """The folder has other files of a tokenizer, so its names alone do not show it."""
    (model / "vocab.json").unlink()
    resolved = config_of(model)
    (tmp_path / CONFIG_FILE).write_text(resolved.to_yaml())
    (problem,) = inspect(resolved, tmp_path).problems
    assert problem.startswith(f"model.path: the model '{model}' has no ")
    assert "tokenizer" in problem


@pytest.mark.slow
def test_a_dry_run_refuses_them_and_a_file_that_was_changed_since(model: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    preflight(config_of(model), run, [], starts=False)
    change(model, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"are not those of its config\.json: 9 are missing"):
        preflight(config_of(model), run, [], starts=False)


def test_a_file_that_is_added_to_the_model_is_read(model: Path, tmp_path: Path) -> None:
    """Also if no check of the rows needs the tokenizer."""
    (tmp_path / "parts.py").write_text("class Workflow:\n    async def run_episode(self, row, context): ...\n")
    resolved = config_of(model, f"workflow={tmp_path}/parts.py:Workflow")
    (tmp_path / CONFIG_FILE).write_text(resolved.to_yaml())
    assert inspect(resolved, tmp_path).problems == []
    (model / "tokenizer.json").write_text("{}")
    (problem,) = inspect(resolved, tmp_path).problems
    assert problem.startswith("model.path: ")


def test_the_class_of_a_workflow_gets_the_tokenizer_every_time(model: Path, tmp_path: Path) -> None:
    """Plugins and models are checked once, rows every time."""
    (tmp_path / "parts.py").write_text(
        "class Workflow:\n    async def run_episode(self, row, context): ...\n"
        "    def check_row(self, row, tokenizer):\n"
        "        return f\"has {len(tokenizer('abc')['input_ids'])} tokens\"\n"
    )
    resolved = config_of(model, f"workflow={tmp_path}/parts.py:Workflow")
    (tmp_path / CONFIG_FILE).write_text(resolved.to_yaml())
    first, second = (inspect(resolved, tmp_path).problems for _ in range(2))
    assert first == second
    assert "row 0 of" in first[0]
    assert "has 3 tokens" in first[0]
