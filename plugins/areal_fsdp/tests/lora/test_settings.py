"""Checks of the section `adapter` before a model is loaded, and the number of an adapter's parameters."""

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from pydantic import ConfigDict, ValidationError
from safetensors.numpy import save_file

from areal_core.config import Selection, Settings
from areal_core.engines import StoredModel
from areal_core.errors import RunError
from areal_fsdp.lora.settings import LoraSettings

SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.mlp.down_proj.weight": (8, 24),
    "lm_head.weight": (11, 8),
}


class Run:
    """The parts of a run's config that the checks read."""

    inference_engine = None
    model = SimpleNamespace(path="elsewhere")


def saved(folder, **changes):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors(), folder / "adapter_model.safetensors")
    return folder


def tensors(rank=4, dtype=np.float32, layers=2):
    """Return an adapter on q_proj of each layer, by PEFT's names."""
    modules = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(layers)]
    shapes = {"A": (rank, 8), "B": (8, rank)}
    return {f"{module}.lora_{part}.weight": np.ones(s, dtype) for module in modules for part, s in shapes.items()}


def test_parameters_are_counted_for_all_layers_or_the_named_ones():
    assert LoraSettings(rank=2).parameters(SHAPES) == 2 * 2 * (8 + 8 + 8 + 24)
    assert LoraSettings(rank=3, modules=["q_proj"]).parameters(SHAPES) == 2 * 3 * (8 + 8)
    assert LoraSettings(rank=3, modules=["layers.1.mlp.down_proj"]).parameters(SHAPES) == 3 * (8 + 24)


@pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens", "proj", "input_layernorm"])
def test_an_unknown_module_name_is_refused_and_the_known_names_are_listed(name):
    with pytest.raises(RunError, match=f"called {name}") as caught:
        LoraSettings(modules=["q_proj", name]).parameters(SHAPES)
    assert "down_proj, q_proj" in caught.value.hints[0]


def test_a_folder_determines_rank_alpha_and_modules(tmp_path):
    known = LoraSettings(from_folder=saved(tmp_path)).resolved()
    assert (known.rank, known.alpha, known.modules) == (4, 8, ["q_proj"])
    assert LoraSettings(from_folder=tmp_path).parameters(SHAPES) == 2 * 4 * (8 + 8)
    with pytest.raises(ValidationError, match="leave out alpha, rank, or set them to null"):
        LoraSettings(from_folder=tmp_path, rank=4, alpha=8)
    written = LoraSettings(from_folder=tmp_path).model_dump()  # a run's own config has every default
    assert LoraSettings.model_validate(written).from_folder == tmp_path
    nulls = {"from_folder": tmp_path, "rank": None, "alpha": None, "modules": None}  # overrides of a config file
    assert LoraSettings.model_validate(nulls) == LoraSettings(from_folder=tmp_path)
    with pytest.raises(ValidationError, match="rank"):
        LoraSettings.model_validate({"rank": None})


@pytest.mark.parametrize(
    "changes",
    [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 8}}, {"target_modules": ".*proj"},
     {"peft_type": "LOHA"}, {"use_rslora": True}, {"lora_dropout": 1.5}],
)  # fmt: skip
def test_an_adapter_that_is_not_plain_is_refused(tmp_path, changes):
    (problem,) = LoraSettings(from_folder=saved(tmp_path, **changes)).problems(Run())
    assert next(iter(changes)) in problem


NOT_PLAIN = {
    "init_lora_weights": [
        "pissa", "pissa_niter_16", "olora", "corda", "loftq", "eva", "lora_ga", "mica", "PISSA", 7,
    ],
    "modules_to_save": [["embed_tokens", "lm_head"], ["score"]],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}],
    "layer_replication": [[[0, 1], [0, 2]]],
    "alora_invocation_tokens": [[5]],
    "fan_in_fan_out": [True],
    "loftq_config": [{"loftq_bits": 4}],
    "megatron_config": [{"x": 1}],
    "use_qalora": [True],
    "layers_pattern": ["layers"],
    "target_parameters": [["mlp.experts"]],
    **{name: [{"x": 1}] for name in ("eva_config", "corda_config", "lora_ga_config", "velora_config", "use_bdlora")},
    **{name: [{"x": 1}] for name in ("monteclora_config", "arrow_config", "kasa_config", "alpha_pattern")},
    "a_field_of_a_later_peft": [True, "fast", {"x": 1}],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NOT_PLAIN.items() for value in values])
def test_every_field_of_an_extended_lora_is_refused_by_name(tmp_path, key, value):
    (problem,) = LoraSettings(from_folder=saved(tmp_path, **{key: value})).problems(Run())
    assert f"is not plain LoRA: {key}={value}" in problem
    assert "merge it into its base model" in problem


def test_defaults_of_the_installed_peft_are_plain_and_other_values_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    save_file(tensors(), weights(tmp_path))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert list(LoraSettings(from_folder=tmp_path).problems(Run())) == []
    accepted = set()
    for key in written:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**written, key: {"unknown": 1}}))
        if not list(LoraSettings(from_folder=tmp_path).problems(Run())):
            accepted.add(key)
    assert accepted <= {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode",
                        "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"init_lora_weights": False}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"},
     {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}, {"a_field_of_a_later_peft": None},
     {"a_field_of_a_later_peft": []}],
)  # fmt: skip
def test_fields_that_leave_an_adapter_plain_lora_are_accepted(tmp_path, changes):
    assert list(LoraSettings(from_folder=saved(tmp_path, **changes)).problems(Run())) == []


def test_a_missing_config_and_a_missing_library_are_found_before_the_start(tmp_path, monkeypatch):
    (problem,) = LoraSettings(from_folder=tmp_path).problems(Run())
    assert "adapter_config.json cannot be read" in problem
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(LoraSettings().problems(Run())) == [
        "adapter needs the library peft, which is not installed: pip install './plugins/areal_fsdp[lora]' "
        "(in a clone of areal)"
    ]


class Engine(Settings):
    model_config = ConfigDict(extra="allow")


def chosen(name, **settings):
    return Selection("inference_engines", f"{name}/{name}", Engine(**settings), reference=name)


def chosen_transport(name):
    return Selection("weight_transports", f"core/{name}", {}, reference=name)


class Synced(Run):
    class weight_sync:
        transport = chosen_transport("memory")

    inference_engine = chosen("vllm", adapter_rank=8)


def test_syncing_only_the_adapter_needs_servers_that_accept_it():
    assert list(LoraSettings(rank=8, sync="alone").problems(Synced())) == []
    (problem,) = LoraSettings(rank=9, sync="alone").problems(Synced())
    assert "set inference_engine.adapter_rank=9" in problem
    other = Synced()
    other.weight_sync = type("Section", (), {"transport": chosen_transport("broadcast")})
    (problem,) = LoraSettings(rank=8, sync="alone").problems(other)
    assert "weight_sync.transport" in problem
    other.inference_engine = chosen("vllm", adapter_rank=None)
    assert "at most rank 0: set inference_engine.adapter_rank=16" in next(LoraSettings(sync="alone").problems(other))
    other.inference_engine = chosen("hf", threads=1)
    (problem, _) = LoraSettings(sync="alone").problems(other)
    assert problem.endswith("hf accepts no adapters: set adapter.sync to merged, or use vllm or sglang")


def test_a_pipe_and_deeply_nested_json_are_refused_as_an_adapter_s_config(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "adapter_config.json").write_text('{"r":' * 100_000)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapter_config.json")
    for name, words in (("deep", "recursion depth"), ("pipe", "it is not a file")):
        (problem,) = LoraSettings(from_folder=tmp_path / name).problems(Run())
        assert words in problem
        assert problem.count("name a folder with") == 1


@pytest.mark.parametrize("changes", [{"r": 0}, {"r": 8.9}, {"lora_alpha": float("nan")}, {"target_modules": [3]}])
def test_invalid_values_in_a_folder_s_config_are_refused(tmp_path, changes):
    saved(tmp_path, **changes)
    (problem,) = LoraSettings(from_folder=tmp_path).problems(Run())
    assert "adapter_config.json cannot be read" in problem


def test_an_adapter_is_not_applied_to_an_export_that_has_it_merged(tmp_path):
    for name in ("adapter", "copy", "other"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name)
    save_file({**tensors(), next(iter(tensors())): np.zeros((4, 8), np.float32)}, weights(tmp_path / "other"))
    model = StoredModel(tmp_path, {}, SHAPES)
    for name in ("adapter", "copy"):
        (problem,) = LoraSettings(from_folder=tmp_path / name).check_model(None, model)
        assert "merged already: set model.path to the model that the adapter was trained on" in problem
    assert list(LoraSettings(from_folder=tmp_path / "other").check_model(None, model)) == []
    assert list(LoraSettings().check_model(None, model)) == []


def weights(folder):
    return folder / "adapter_model.safetensors"


UNREADABLE = {
    "missing": (lambda path: None, "No such file"),
    "a folder": (lambda path: path.mkdir(), "it is not a file"),
    "a pipe": (os.mkfifo, "it is not a file"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "empty": (lambda path: path.touch(), "header"),
    "truncated": (lambda path: path.write_bytes(safetensors.numpy.save(tensors())[:-1]), "not fully covered"),
    "of integers": (
        lambda path: save_file(tensors(dtype=np.int8), path),
        "' is I8, not floating-point",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_weights_are_reported_before_the_start(tmp_path, kind):
    write, reason = UNREADABLE[kind]
    path = weights(saved(tmp_path))
    path.unlink()
    write(path)
    (problem,) = LoraSettings(from_folder=tmp_path).problems(Run())
    assert problem.startswith(f"the adapter '{path}' cannot be read: ")
    assert reason in problem
    assert "name a folder with adapter_config.json and adapter_model.safetensors" in problem


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (tensors(rank=8), "'model.layers.0.self_attn.q_proj.weight' A and B must be (4, 8) and (8, 4), but are (8, 8)"),
        (
            tensors(layers=1),
            "'model.layers.1.self_attn.q_proj.weight' A and B must be (4, 8) and (8, 4), but are missing",
        ),
        (
            tensors(layers=3),
            "layers.2.self_attn.q_proj.lora_A.weight', but the model has no such matrix",
        ),
        (
            {**tensors(), "base_model.model.lm_head.lora_A.weight": np.ones(2)},
            "it has 'base_model.model.lm_head",
        ),
    ],
)
def test_weights_of_another_model_or_rank_are_refused_by_the_headers_of_the_files(tmp_path, found, words):
    save_file(found, weights(saved(tmp_path)))
    with pytest.raises(RunError, match=re.escape(words)) as caught:
        LoraSettings(from_folder=tmp_path).parameters(SHAPES)
    assert "on the same base model" in caught.value.hints[0]


def test_a_saved_head_is_no_part_of_the_adapter(tmp_path):
    save_file({**tensors(), "base_model.model.score.weight": np.ones((1, 8))}, weights(saved(tmp_path)))
    assert LoraSettings(from_folder=tmp_path).parameters(SHAPES) == 2 * 4 * (8 + 8)


def test_a_rank_larger_than_every_matrix_is_refused():
    assert LoraSettings(rank=8).parameters(SHAPES)
    narrow = {"model.layers.0.gate.weight": (4, 8)}
    assert LoraSettings(rank=8).parameters({**SHAPES, **narrow}), "one narrow matrix is allowed"
    with pytest.raises(RunError, match=r"rank 1000000000 is larger than any matrix allows: '.*q_proj") as caught:
        LoraSettings(rank=1_000_000_000, alpha=1e9).parameters(SHAPES)
    assert "of rank 8 or less" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modules": []}, "must be all-linear, or a list of names such as [q_proj, v_proj]"),
        ({"modules": 7}, "must be all-linear, or a list of names"),
        ({"alpha": 1e308}, "alpha / rank is 6.25e+306; the maximum is 1,000,000"),
    ],
)
def test_an_invalid_setting_gives_one_error(settings, words):
    with pytest.raises(ValidationError) as caught:
        LoraSettings.model_validate(settings)
    (error,) = caught.value.errors()
    assert words in error["msg"]
