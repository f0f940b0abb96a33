"""The plan's memory: what is told of a model that is known by its config and its files' headers alone, and refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.checks.data import inspect_data
from areal_core.checks.models import StoredModels
from areal_core.checks.plan import group_rows
from areal_core.checks.preflight import Preflight, check_evaluation, check_made_model
from areal_core.config import resolve
from areal_core.disk import read_shapes
from areal_core.engines import ModelReference
from areal_core.errors import ConfigError, RunError
from areal_core.inference.gpu_share import GPUShare
from areal_core.interfaces.launcher import OnExit, ProcessGroup
from areal_core.runs.server import within_its_gpu
from tests.checks.header_only import write_weights
from tests.checks.planning import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIDDEN, LAYERS, MIDDLE, VOCABULARY = 1024, 4, 4096, 50_000
DESCRIPTION = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": MIDDLE,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
SHAPES = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(LAYERS)
    for name, shape in (("q", [HIDDEN, HIDDEN]), ("up", [MIDDLE, HIDDEN]), ("down", [HIDDEN, MIDDLE]))
}
COUNT = VOCABULARY * HIDDEN + HIDDEN + LAYERS * HIDDEN * (HIDDEN + 2 * MIDDLE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DESCRIPTION))
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors", SHAPES)
    return folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(model: Path, *words: str) -> Preflight:
    common = ["model.source=null", f"model.path={model}", "model.dtype=bfloat16"]
    return plan_of(resolve(None, ["grpo"], [*common, "weight_sync.transport=broadcast", *words]))


def test_a_disk_without_room_for_checkpoints_is_refused_and_one_that_may_become_full_is_noted(
    model: Path, tmp_path: Path
) -> None:
    """AdamW's two moments and the masters are float32; the model is exported in bfloat16."""
    words = ["model.source=null", f"model.path={model}", "model.dtype=bfloat16", "evaluation=null"]

    def make(*more: str) -> Preflight:
        return plan_of(resolve(None, ["grpo"], [*words, *more]), tmp_path / "run" / "deep")

    checkpoint, exported, many = 12 * COUNT, 2 * COUNT, 10**9
    disk = make("checkpoint.keep=3").figures["disk"]
    assert (disk["checkpoint"], disk["model"]) == (checkpoint, exported)
    assert (disk["least"], disk["most"]) == (checkpoint + exported, 4 * checkpoint)
    disk = make("steps=5", "checkpoint.every=2", "checkpoint.keep=3", "checkpoint.export=false").figures["disk"]
    assert (disk["least"], disk["most"]) == (3 * checkpoint, 4 * checkpoint)
    held_out = "evaluation={dataset: {type: grpo/additions, split: held_out}}"
    disk = make("checkpoint.keep=3", held_out).figures["disk"]
    assert (disk["least"], disk["most"]) == (checkpoint + 2 * exported, 4 * checkpoint + 2 * exported)
    disk = make("steps=5", "checkpoint.every=1", "checkpoint.keep=3", held_out).figures["disk"]
    assert disk["least"] == 4 * checkpoint + exported, "the oldest checkpoint is removed before the export"
    assert "the disk may become full" not in str(make())
    assert "the disk may become full: a checkpoint takes" in str(make(f"checkpoint.keep={many}"))
    with pytest.raises(ConfigError) as refusal:
        make(f"checkpoint.keep={many}", "checkpoint.every=1", f"steps={many}")
    (told,) = refusal.value.problems
    assert told.startswith("run_dir: the run needs ")
    assert "free: a checkpoint takes " in told
    endless = resolve(None, ["grpo"], [*words, f"checkpoint.keep={many}", "checkpoint.every=1", f"steps={many}"])
    with pytest.raises(ConfigError, match="the run cannot start"):  # as of a model that was made by the run
        check_made_model(endless, model, tmp_path / "run", pytest.fail)


def test_a_resumed_run_replaces_what_it_has_written(model: Path, tmp_path: Path) -> None:
    words = ["model.source=null", f"model.path={model}", "evaluation=null"]
    before = plan_of(resolve(None, ["grpo"], words), tmp_path / "run").figures["disk"]["free"]
    kept = tmp_path / "run/attempts/1/checkpoints/step-000002"
    kept.mkdir(parents=True)
    with (kept / "part").open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and counts
    after = plan_of(resolve(None, ["grpo"], words), tmp_path / "run").figures["disk"]["free"]
    assert after - before > 1 << 39


def test_a_resumed_run_needs_room_for_the_checkpoints_that_it_has_and_those_to_come(
    model: Path, tmp_path: Path
) -> None:
    words = [
        "model.source=null",
        f"model.path={model}",
        "model.dtype=bfloat16",
        "evaluation=null",
        "checkpoint.every=2",
    ]
    checkpoint, exported = 12 * COUNT, 2 * COUNT

    def least(*more: str) -> int:
        disk = plan_of(resolve(None, ["grpo"], [*words, *more]), tmp_path / "run").figures["disk"]
        return int(disk["least"])

    assert least("steps=7", "checkpoint.keep=9") == 4 * checkpoint + exported
    (tmp_path / "run/attempts/1/checkpoints/step-000005").mkdir(parents=True)
    assert least("steps=5", "checkpoint.keep=9") == checkpoint + exported, "the export alone is left to write"
    assert least("steps=5", "checkpoint.keep=9", "checkpoint.every=0") == checkpoint + exported
    assert least("steps=7", "checkpoint.keep=9") == 3 * checkpoint + exported, "steps 6 and 7"
    assert least("steps=7", "checkpoint.keep=9", "checkpoint.every=0") == 2 * checkpoint + exported
    assert least("steps=7", "checkpoint.keep=1") == 2 * checkpoint, "the export has the room of the former checkpoint"


class Noted:
    """A data set that left a column out."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": "a"}

    def notes(self) -> list[str]:
        return ["column 'prompt' is left out"]


def test_what_rows_lack_is_in_the_plan_and_beside_the_check_that_looks_for_it(model: Path) -> None:
    dataset = f"dataset={Noted.__module__}:Noted"
    found = plan(model, dataset, "evaluation=null", "workflow.prompt_key=question")
    assert ("note", "dataset: column 'prompt' is left out") in found.rows
    assert found.notes == ["dataset: column 'prompt' is left out"]
    with pytest.raises(ConfigError, match=r"has no 'prompt'(?s:.*)column 'prompt' is left out"):
        plan(model, dataset, "evaluation=null")


def test_a_gpu_run_is_planned_where_there_is_no_gpu(model: Path) -> None:
    found = plan(model, "placement.gpu_memory_gib=80")
    assert found.figures["parameters"] == COUNT
    actor = found.figures["memory"]["roles"]["actor"]
    assert actor["parameters"] == 6 * COUNT
    assert actor["total"] == found.figures["memory"]["peak"]
    assert found.figures["memory"]["gpu"] == 80 << 30
    weight_sync = found.figures["weight_sync"]
    assert (weight_sync["bytes"], weight_sync["largest_tensor"]) == (2 * COUNT, 2 * VOCABULARY * HIDDEN)
    assert json.loads(found.to_json())["memory"] == found.figures["memory"]
    assert f"{actor['total'] / 2**30:.1f} GiB for each of 1 rank(s)" in str(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "selective"),  # left open, and layers are compiled on a GPU
        (["train_engine.activation_checkpointing=none"], "no checkpointing"),
        (["train_engine.activation_checkpointing=full"], "full"),
        (["train_engine.compile=false"], "no checkpointing"),
    ],
)
def test_the_choice_of_checkpointing_that_was_reckoned_with_is_told(model: Path, words: list[str], said: str) -> None:
    found = plan(model, "placement.gpu_memory_gib=80", *words)
    kept = found.figures["memory"]["roles"]["actor"]["activations"] / 2**30
    assert f", activations {kept:.1f} ({said}), " in str(found)


def test_a_folder_without_a_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as raised:
        plan(model)
    (problem,) = raised.value.problems
    assert str(problem) == f"model.path: {model} holds no tokenizer; save one there with save_pretrained"


def problem_of(model: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        plan(model)
    (problem,) = raised.value.problems
    return str(problem)


def test_a_file_of_another_length_than_its_header_says_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    for size in (7, 9):
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
        assert f"the weights in {path} are incomplete" in problem_of(model)


@pytest.mark.parametrize(
    ("quantized", "advice"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "areal dequantize"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "areal dequantize"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "name the folder of the model in bfloat16"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "name the folder of the model in bfloat16"),
        ({"compression_config": {"format": "int-quantized"}}, "name the folder of the model in bfloat16"),
        ({"quantization_config": "of a later version"}, "name the folder of the model in bfloat16"),
    ],
)
def test_quantized_weights_are_refused_for_training(model: Path, quantized: dict[str, Any], advice: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    problem = problem_of(model)
    assert f"model.path: the weights of '{model}' are quantized (" in problem
    assert advice in problem


def test_an_empty_quantization_is_refused_as_transformers_does(model: Path) -> None:
    """It names no method, so that the weights counted as plain until the run loaded them."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {}}))
    problem = problem_of(model)
    assert problem.startswith(f"model.path: config.json of '{model}' has an empty quantization_config")
    assert problem.endswith("remove this key from config.json: the weights are not quantized")


def test_scales_tell_of_quantized_weights_where_the_config_does_not(model: Path) -> None:
    write_weights(model / "model.safetensors", SHAPES | {"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)})
    problem = problem_of(model)
    assert "are quantized: 'model.layers.0.mlp.up_proj.weight_scale_inv' is the scale of others" in problem
    assert "copy the config.json that was published" in problem


def test_what_is_no_file_is_not_waited_for(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "cannot be read: it is neither a file nor a link to a file" in problem_of(model)


def test_a_file_without_tensors_is_refused(model: Path) -> None:
    write_weights(model / "model.safetensors", {})
    assert "it has no *.safetensors with tensors" in problem_of(model)
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert "load them with transformers, then call save_pretrained" in problem_of(model)


def test_an_index_that_names_what_is_not_there_is_refused(model: Path) -> None:
    first, index = model / "model-00001-of-00002.safetensors", model / "model.safetensors.index.json"
    (model / "model.safetensors").rename(first)
    places = dict.fromkeys(SHAPES, first.name)
    index.write_text(json.dumps({"weight_map": places}))
    plan(model)
    index.write_text(json.dumps({"weight_map": {**places, "more": first.name}}))
    assert f"{index.name} names tensors that no file has: more" in problem_of(model)
    index.write_text(json.dumps({"weight_map": {**places, "more": "model-00002-of-00002.safetensors"}}))
    assert f"{index.name} names files that are missing: model-00002-of-00002.safetensors" in problem_of(model)
    for text in ("not JSON", "[]", "{}", '{"weight_map": 3}', json.dumps({"weight_map": {"a": "b" * 300}}), "[" * 9999):
        index.write_text(text)
        assert f"{index} is not an index: " in problem_of(model)


def test_what_cannot_fit_is_refused_with_what_would(model: Path) -> None:
    words = ["train_engine.logprob_chunk_tokens=1024", "train_engine.max_tokens_per_microbatch=16384"]
    need = plan(model, *words, "placement.gpu_memory_gib=80").figures["memory"]["peak"] / 2**30
    words.append(f"placement.gpu_memory_gib={0.8 * need}")
    with pytest.raises(ConfigError) as raised:
        plan(model, *words)
    (problem,) = raised.value.problems
    assert str(problem).startswith("train_engine: a rank needs")
    told = str(problem).partition("to spare: ")[2].split("; or ")
    assert [words.partition("=")[0].rpartition(".")[2] for words in told] == [
        "max_tokens_per_microbatch",
        "activation_checkpointing",
        "trainer_processes",
    ]
    for changes in told[:2]:  # nor are there processors here for so many ranks
        plan(model, *words, *changes.split())


def test_the_longest_sequence_that_fits_is_said_before_anything_starts(model: Path) -> None:
    gpu = "placement.gpu_memory_gib=8"
    found = plan(model, gpu)
    longest = found.figures["memory"]["longest"]["actor"]
    assert longest > 2048
    assert f"actor: a sequence or micro-batch of {longest:,} tokens fits with a tenth to spare" in str(found)
    whole = ["rollout.batch_size=4096", "rollout.group_size=64"]  # a batch that fills any micro-batch
    peaks = [
        plan(model, gpu, *whole, f"train_engine.max_tokens_per_microbatch={tokens}").figures["memory"]["peak"] / 2**30
        for tokens in (longest, longest + 1024)
    ]
    assert peaks[0] <= 7.2 < peaks[1]


def test_more_ranks_are_proposed_where_parameters_are_what_is_large(model: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(model, "placement.gpu_memory_gib=1.9", "train_engine.max_tokens_per_microbatch=1024")
    assert "launcher.trainer_processes=" in str(raised.value.problems[0])
    fixed = ["placement.gpu_memory_gib=1.9", "train_engine.max_tokens_per_microbatch=1024"]
    with pytest.raises(ConfigError) as raised:
        plan(model, *fixed, "train_engine.parallel.data=1")
    assert "trainer_processes" not in str(raised.value.problems[0]), "that many ranks it would refuse"
    with pytest.raises(ConfigError, match="cannot start") as raised:
        plan(model, "placement.gpu_memory_gib=0.01")
    assert "smaller micro-batches, checkpointing, host memory and more ranks do not suffice" in str(
        raised.value.problems[0]
    )


def test_what_does_not_train_needs_no_memory_for_it(model: Path) -> None:
    """`areal eval` asks for the same checks."""
    words = ["model.source=null", f"model.path={model}", "placement.gpu_memory_gib=0.01"]
    check_evaluation(resolve(None, ["grpo"], words))


def test_roles_stay_beside_the_one_that_computes(model: Path) -> None:
    one = plan(model, "placement.gpu_memory_gib=80").figures["memory"]
    words = ["algorithm.regularizers=[{type: grpo/reference_kl, coefficient: 0.1}]"]
    two = plan(model, "placement.gpu_memory_gib=80", *words).figures["memory"]
    assert set(two["roles"]) == {"actor", "reference"}
    assert two["peak"] == one["peak"] + 2 * COUNT, "a frozen one has nothing but what it computes with"


def test_without_a_gpu_nothing_is_refused_and_the_need_is_told(model: Path) -> None:
    found = plan(model, "train_engine.max_tokens_per_microbatch=100000000")
    assert found.figures["memory"]["gpu"] is None
    assert "set placement.gpu_memory_gib to plan for other GPUs" in str(found)


def test_colocated_the_plan_says_what_is_left_to_servers(model: Path) -> None:
    same = ["weight_sync.transport=memory", "placement.generation=[0]", "placement.training=[0]"]
    words = ["placement.gpu_memory_gib=80", *same]
    beside = plan(model, *words)
    peak = beside.figures["memory"]["peak"]
    assert f"the trainer holds {peak / 2**30:.1f} GiB while servers generate" in str(beside)
    turns = ["plugins=[grpo, sglang, fsdp, hf]", "inference_engine={type: sglang, program: [x], memory_saver: true}"]
    assert f"the trainer holds {14 * COUNT / 2**30:.1f} GiB while servers" in str(plan(model, *words, *turns))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_that_keep_their_memory_get_what_the_trainer_leaves(model: Path, engine: str) -> None:
    words = ["placement.gpu_memory_gib=80", f"inference_engine={{type: {engine}, program: [x]}}"]
    words += ["weight_sync.transport=memory", "placement.training=[0]"]
    keys = 2 * LAYERS * HIDDEN * 2  # keys and values of a token, 2 bytes each
    for servers in (1, 3):
        found = plan(model, *words, f"placement.generation={[0] * servers}", "sampling.max_new_tokens=10000")
        share, peak = found.figures["gpu_share"], found.figures["memory"]["peak"]
        spared = 80 * (1 << 30) * (servers + 1) / 10
        assert peak + spared + servers * share["room_bytes"] == pytest.approx(80 << 30, abs=servers + 1)
        assert share["cache_tokens"] == (share["room_bytes"] - 2 * COUNT) // keys
        assert f"keys and values of {share['cache_tokens']:,} tokens" in str(found)
    short = plan(model, *words, "placement.generation=[0]", "rollout.batch_size=2", "rollout.group_size=4")
    config = short.figures["gpu_share"]
    assert config["cache_tokens"] == config["useful_tokens"] < 20_000, "no more than live requests can use"
    alone = plan(model, *words, "placement.generation=[1]", "placement.training=[0]")
    assert "gpu_share" not in alone.figures, "they have the GPU alone"
    taken = plan(model, *words, "placement.generation=[1,1]", "placement.training=[0]")
    assert taken.figures["gpu_share"]["trainer_bytes"] == 0, "the trainer is on another GPU"


def test_the_plan_advises_several_servers_where_they_were_measured_to_be_faster(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["inference_engine={type: sglang, program: [x]}", "weight_sync.transport=memory"]
    one = [*words, "placement={generation: [0], training: [0], gpu_memory_gib: 80}"]
    three = [*words, "placement={generation: [0, 0, 0], training: [0], gpu_memory_gib: 80}"]
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert "placement={generation: [0, 0, 0], training: [0]}" in " ".join(plan(model, *one).notes)
    assert "generate faster" not in str(plan(model, *three))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert "generate faster" not in str(plan(model, *one)), "so few cores are full with one server"
    share = GPUShare(80 << 30, 4 << 30, 1, 3 << 30, 1 << 10, 0, 10_000)
    assert not share.gains_from_several, "a larger model was not measured"
    small = share._replace(weight_bytes=1 << 29)
    assert small.gains_from_several
    assert not small._replace(gpu_bytes=12 << 30, trainer_bytes=8 << 30).gains_from_several, "three have no room"


def test_servers_for_which_the_trainer_leaves_too_little_are_refused(model: Path) -> None:
    engine = "inference_engine={type: sglang, program: [x]}"
    words = [engine, "weight_sync.transport=memory", "placement={training: [0], generation: [0]}"]
    unknown = str(plan(model, *words))
    assert "each sizes its cache on its GPU by what the trainer leaves" in unknown
    with pytest.raises(ConfigError) as raised:
        plan(model, *words, "placement.gpu_memory_gib=5")  # of which the trainer takes 4
    (problem,) = raised.value.problems
    assert problem.startswith("inference_engine: a GPU of")
    assert "set inference_engine.memory_saver=true" in problem
    deepspeed = "train_engine={type: deepspeed, config: {zero_optimization: {stage: 2}}}"
    with pytest.raises(ConfigError, match="the plan does not know what the trainer needs"):
        plan(model, *words, deepspeed, "placement.gpu_memory_gib=80")


def test_a_server_limits_its_memory_on_the_gpu_where_it_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that the machine which planned the run may not have."""
    resolved = resolve(
        None,
        ["grpo"],
        [
            "model.source=null",
            f"model.path={model}",
            "inference_engine={type: sglang, program: [x]}",
            "placement={training: [0], generation: [0]}",
        ],
    )
    settings: Any = resolved.config.inference_engine.settings
    reference = ModelReference(str(model), "bfloat16")
    with pytest.raises(RunError, match="the memory of this GPU is not known"):
        within_its_gpu(settings, resolved, reference)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '81920, 0, GPU-a1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    expected = plan_of(resolved).figures["gpu_share"]["cache_tokens"]
    assert within_its_gpu(settings, resolved, reference).options["max_total_tokens"] == expected > 0


def test_this_machines_gpus_count_where_the_config_names_none(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '40960, 0, GPU-a1\\n81920, 1, GPU-b2\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    common = ["model.source=null", f"model.path={model}"]
    config: Any = resolve(None, ["grpo"], common).config
    assert config.placement.gpu_bytes() == 40 << 30, "the smallest"
    chosen: Any = resolve(None, ["grpo"], [*common, "placement.training=[1]"]).config
    assert chosen.placement.gpu_bytes() == 80 << 30
    for shown, size in (("1", 80 << 30), ("GPU-b", 80 << 30), ("1,0,", 40 << 30), ("-1", None), ("MIG-c3", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert config.placement.gpu_bytes() == size, shown
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert config.placement.gpu_bytes() is None


def test_a_tilde_in_a_models_path_is_the_home_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    words = ["model.source=null", "model.path=~/model", "model.dtype=bfloat16"]
    assert plan_of(resolve(None, ["grpo"], words)).figures["parameters"] == COUNT


def test_files_that_are_no_weights_are_told(model: Path) -> None:
    assert {name: list(shape) for name, shape in read_shapes(model).items()} == SHAPES
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError) as raised:
        plan(model)
    assert "model.safetensors are incomplete, or are a Git LFS pointer" in str(raised.value.problems)


def test_a_broken_description_is_named(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError) as raised:
        plan(model)
    assert "config.json cannot be read (Expecting property name" in str(raised.value.problems[0])


def test_heads_that_ranks_cannot_divide_are_refused(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**DESCRIPTION, "num_attention_heads": 3, "head_dim": 8}))
    with pytest.raises(ConfigError) as raised:
        plan(model, "launcher.trainer_processes=2", "train_engine.parallel.tensor=2")
    (problem,) = raised.value.problems
    assert "3 heads of attention with 3 key heads cannot be divided among tensor 2" in str(problem)


def test_a_broadcast_colocated_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="no group in which a GPU is twice"):
        plan(model, "placement.generation=[0]", "placement.training=[0]")


def test_more_gpus_are_proposed_where_placement_names_too_few(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(model, "placement.gpu_memory_gib=1.7", "placement.generation=[4]", "placement.training=[0]",
             "train_engine.max_tokens_per_microbatch=1024")  # fmt: skip
    assert "GPUs for training in placement" in str(caught.value)


def test_stop_tokens_that_the_model_does_not_have_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(model, f"sampling.stop_token_ids=[7,{VOCABULARY}]")
    told = f"sampling.stop_token_ids: [{VOCABULARY}] are no tokens of the model, which has 50,000"
    assert told in raised.value.problems


def test_settings_that_do_nothing_are_noted(model: Path) -> None:
    config = resolve(None, ["grpo"], []).config
    rows = json.dumps(config.model_dump(mode="json")["dataset"])
    words = ["rewards=[{type: grpo/right_result, weight: 0}]", f"evaluation.dataset={rows}", "steps=3",
             "training.num_minibatches=1", "train_engine.warmup_steps=3"]  # fmt: skip
    notes = [text for label, text in plan(model, *words).rows if label == "note"]
    assert [note for note in notes if note not in config.cross_notes()] == [
        "rewards: all weights are 0, so every answer earns the same",
        "evaluation.dataset: is that of training, so its score is no held-out one",
        "train_engine: warmup_steps is 3, but the run has 3 updates: it ends before its warm-up",
    ]
    with pytest.raises(ConfigError, match=r"sampling.stop.0: .* at least 1 character"):
        plan(model, 'sampling.stop=[""]')


@pytest.mark.parametrize("key", ["roles.reference.path", "model.path"])
def test_what_is_taken_for_a_name_on_the_hub_is_told_with_the_folder_that_is_not_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"{key}: there is no folder /.*/models/lost, and 'models/lost' cannot be"):
        plan(model, "algorithm.regularizers=[reference_kl]", f"{key}=models/lost")


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        (lambda folder: None, True),
        (lambda folder: (folder / "model.safetensors").unlink(), False),
        (lambda folder: (folder / "tokenizer.json").unlink(), False),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})
            ),
            False,
        ),
    ],
    ids=["complete", "no weights", "no tokenizer", "half of the weights"],
)
def test_a_dry_run_reads_a_model_of_the_hub_that_was_downloaded_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], is_read: bool
) -> None:
    """A dry run asks the hub for config.json alone, and downloads no weights."""
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--mine--small" / "snapshots" / commit
    shutil.copytree(model, snapshot)
    change(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resolved = resolve(None, ["grpo"], ["model.source=null", "model.path=mine/small", "model.dtype=bfloat16"])
    stored = StoredModels(resolved, ["config.json"])
    assert stored.problems == []
    found = stored.by_key["model.path"]
    assert (found is not None) == is_read
    assert found is None or dict(found.shapes) == {name: tuple(shape) for name, shape in SHAPES.items()}


ROWS = """\
class Rows:
    def __len__(self): return 500
    def __getitem__(self, index): return {"prompt": "a"} if index == 333 else {"prompt": "a", "answer": "b"}
"""


def test_a_key_that_single_rows_lack_is_found_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    words = [f"dataset={tmp_path}/rows.py:Rows", "evaluation=null"]
    (report,) = inspect_data(resolve(None, ["grpo"], words).config)
    assert report.keys == {"prompt": "", "answer": "row 333 of the data set (counted from 0)"}


def test_the_plan_says_what_follows_from_the_end_of_a_process() -> None:
    groups = [ProcessGroup("trainer", "trainer", []), ProcessGroup("worker-0", "worker", [], on_exit=OnExit.RESTART)]
    assert list(group_rows(groups)) == [
        ("groups", "1 x trainer; if one ends, the run starts again from its last checkpoint"),
        ("", "1 x worker; if one ends, it is restarted"),
    ]
