"""What a config cannot do with its model is refused before that is loaded: by its config.json and headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.checks.preflight import check_model
from areal_core.cli import main
from areal_core.config import resolve
from areal_core.errors import ConfigError
from tests.checks.header_only import write_weights
from tests.checks.planning import plan_of

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("areal_vision", reason="the first-party plugins are not installed")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
}
ATTENTION = {f"self_attn.{name}_proj": [32, 32] for name in "qkvo"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "text": ({"model_type": "qwen3", **SIZES}, {**ATTENTION, "mlp.up_proj": [64, 32]}),
    "moe": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **SIZES},
        {**ATTENTION, "mlp.gate": [4, 32], **{f"mlp.experts.{n}.up_proj": [16, 32] for n in range(4)}},
    ),
    "fused": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **SIZES},
        {**ATTENTION, "mlp.gate": [4, 32], "mlp.experts.gate_up": [4, 32, 32]},
    ),
    "images": ({"model_type": "qwen3_vl", "text_config": SIZES, "vision_config": {"depth": 1}}, ATTENTION),
}
"""By kind: config.json, and the shapes of a layer's matrices."""


def written(folder: Path, kind: str) -> Path:
    description, layer = MODELS[kind]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(description))
    (folder / "tokenizer.json").write_text("{}")
    prefix = "model.language_model" if kind == "images" else "model"
    shapes = {f"{prefix}.layers.0.{name}.weight": shape for name, shape in layer.items()}
    if kind == "images":
        shapes["model.visual.blocks.0.attn.qkv.weight"] = [96, 32]
        (folder / "preprocessor_config.json").write_text("{}")
    write_weights(folder / "model.safetensors", shapes)
    return folder


IMAGES = ("workflow=vision/single_turn", "dataset=vision/squares")
RANKS = ("launcher.type=ray", "launcher.trainer_processes=2")
REFUSED = [
    ("text", ["train_engine.adapter={modules: [w_proj]}"], "no matrix in the model's layers is called w_proj"),
    ("images", ["train_engine.adapter={modules: [qkv]}"], "no matrix in the model's layers is called qkv"),
    ("moe", ["train_engine.adapter={modules: [up_proj, q_proj]}"], "up_proj are matrices of the model's experts"),
    ("text", [*RANKS, "train_engine.parallel.expert=2"], "the model has none: set train_engine.parallel.expert to 1"),
    (
        "moe",
        ["launcher.type=ray", "launcher.trainer_processes=3", "train_engine.parallel.expert=3"],
        "4 experts cannot be divided among 3 ranks",
    ),
    ("images", [*RANKS, "train_engine.parallel.expert=2"], "the model has none"),
    (
        "images",
        [*IMAGES, *RANKS, "train_engine.parallel.context=2"],
        "VLMs support neither context nor tensor parallelism",
    ),
    (
        "images",
        [*IMAGES, *RANKS, "train_engine.parallel.tensor=2"],
        "set train_engine.parallel.context and .tensor to 1",
    ),
    ("text", ["train_engine.adapter={rank: 1000000000}"], "rank 1000000000 is larger than any matrix allows"),
    ("text", ["inference_engine.routed_experts=true"], "model type qwen3 has no routers whose choices are known"),
    ("text", ["inference_engine={type: sglang, routed_experts: true}"], "has no routers whose choices are known"),
    ("text", ["inference_engine={type: vllm, routed_experts: true}"], "has no routers whose choices are known"),
    ("text", IMAGES, "is not a vision-language model: choose one of Qwen's"),
    (
        "images",
        ["train_engine={type: deepspeed, config: {zero_optimization: {stage: 2}}}"],
        "is a vision-language model, which the deepspeed engine does not support: use the train engine fsdp/fsdp",
    ),
]
TAKEN = [
    ("text", ["train_engine.adapter={modules: [q_proj]}"]),
    ("text", ["train_engine.adapter={}"]),
    ("moe", ["train_engine.adapter={}"]),
    ("moe", ["train_engine.adapter={modules: [q_proj]}"]),
    ("fused", ["train_engine.adapter={}"]),
    ("moe", [*RANKS, "train_engine.parallel.expert=2"]),
    ("moe", ["inference_engine.routed_experts=true"]),
    ("text", [*RANKS, "train_engine.parallel.context=2"]),
    ("images", [*RANKS, "train_engine.parallel.context=2"]),
    ("images", [*RANKS, "train_engine.parallel.tensor=2"]),
    ("images", IMAGES),
    ("images", [*IMAGES, "train_engine.adapter={modules: [q_proj]}"]),
]


def words_of(model: Path, words: list[str] | tuple[str, ...]) -> list[str]:
    return ["model.source=null", f"model.path={model}", "evaluation=null", *words]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words", "message"), REFUSED)
def test_what_the_model_is_not_made_for_is_refused(
    kind: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="adapters need it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolved = resolve(None, ["grpo"], words_of(written(tmp_path / "model", kind), words))
    for look in (check_model, plan_of):
        with pytest.raises(ConfigError) as raised:
            look(resolved)
        (problem,) = [problem for problem in raised.value.problems if message in problem]
        assert problem.startswith(("train_engine: ", "workflow: ", "inference_engine: "))
        assert raised.value.hints == raised.value.problems


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), TAKEN)
def test_what_it_is_made_for_is_taken(
    kind: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="adapters need it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_model(resolve(None, ["grpo"], words_of(written(tmp_path / "model", kind), words)))


def test_a_model_for_images_without_its_image_processor_is_refused(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "images")
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="has no image processor"):
        check_model(resolve(None, ["grpo"], words_of(model, IMAGES)))


def test_images_that_a_workflow_does_not_show_are_refused(tmp_path: Path) -> None:
    """Without an image all is well."""
    model = written(tmp_path / "model", "images")

    def problems(workflow: str, row: dict[str, Any], data: str = "rewards/jsonl") -> list[str]:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "answer": "3", **row}))
        words = words_of(model, [f"workflow={workflow}", f"dataset={{type: {data}, paths: [{tmp_path}/rows.jsonl]}}"])
        try:
            plan_of(resolve(None, ["grpo", "rewards", "vision"], words))
        except ConfigError as error:
            return list(error.problems)
        return []

    for row in {"image": "a.png"}, {"images": ["a.png"]}, {"image": {"bytes": "x", "path": None}}:
        (told,) = problems("core/single_turn", row)
        assert f" has an image ('{next(iter(row))}'), and this workflow shows the model none" in told
        assert told.startswith("dataset: row 0 of the data set")
        assert "choose workflow: vision/single_turn" in told
    for other in (
        {"image": None, "images": []},
        {"image": "sweb.eval:latest"},
        {"image": 3},
        {"image": {"bytes": None}},
    ):
        assert problems("core/single_turn", other) == [], "other things are called images as well"
    assert all("shows the model none" not in told for told in problems("vision/single_turn", {"image": "absent.png"}))


def test_config_check_looks_at_a_model_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path / "model", "text")
    words = ["config", "check", "--plugins", "grpo", *words_of(model, IMAGES)]
    assert main(words) == 1
    assert "workflow: the model in" in capsys.readouterr().err
    (tmp_path / "model").rename(tmp_path / "elsewhere")  # as on the machine where a config is written
    assert main(words) == 0
    assert "is valid" in capsys.readouterr().out


def test_the_plan_names_the_adapter_and_what_it_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="adapters need it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text, seen = written(tmp_path / "text", "text"), written(tmp_path / "seen", "images")
    words = ["placement.gpu_memory_gib=80", "train_engine.adapter={rank: 8, modules: [q_proj]}"]
    message = str(plan_of(resolve(None, ["grpo"], words_of(text, words))))
    assert f"an adapter of rank 8 learns, {8 * (32 + 32)} parameters" in message
    assert "the memory plan does not count this engine's copy" in message
    message = str(plan_of(resolve(None, ["grpo"], words_of(seen, ["placement.gpu_memory_gib=80"]))))
    assert "GiB for each of 1 rank(s)" in message, "its language model is trained from text"
    message = str(plan_of(resolve(None, ["grpo"], words_of(text, []))))
    assert "adapter" not in message
    assert "does not count" not in message
