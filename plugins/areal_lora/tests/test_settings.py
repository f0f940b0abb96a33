"""What is said before a model is loaded, and how many parameters an adapter has."""

import json
import os
from types import SimpleNamespace

import pytest
from pydantic import ConfigDict, ValidationError

from areal_core.config import Selection, Settings
from areal_core.errors import RunError
from areal_lora.settings import LoraSettings

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
    """What is asked of a config."""

    inference_engine = None
    model = SimpleNamespace(path="elsewhere")


def saved(folder, **changes):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_parameters_of_all_layers_or_of_those_named():
    assert LoraSettings(rank=2).parameters(SHAPES) == 2 * 2 * (8 + 8 + 8 + 24)
    assert LoraSettings(rank=3, modules=["q_proj"]).parameters(SHAPES) == 2 * 3 * (8 + 8)
    assert LoraSettings(rank=3, modules=["layers.1.mlp.down_proj"]).parameters(SHAPES) == 3 * (8 + 24)


@pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens", "proj", "input_layernorm"])
def test_a_name_that_no_layer_has_is_refused_with_those_that_it_has(name):
    with pytest.raises(RunError, match=f"called {name}") as caught:
        LoraSettings(modules=["q_proj", name]).parameters(SHAPES)
    assert "down_proj, q_proj" in caught.value.hints[0]


def test_a_folder_says_what_the_adapter_is(tmp_path):
    known = LoraSettings(from_folder=saved(tmp_path)).resolved()
    assert (known.rank, known.alpha, known.modules) == (4, 8, ["q_proj"])
    assert LoraSettings(from_folder=tmp_path).parameters(SHAPES) == 2 * 4 * (8 + 8)
    with pytest.raises(ValidationError, match="leave out alpha, rank"):
        LoraSettings(from_folder=tmp_path, rank=4, alpha=8)
    written = LoraSettings(from_folder=tmp_path).model_dump()  # a run's own config has every default
    assert LoraSettings.model_validate(written).from_folder == tmp_path


@pytest.mark.parametrize(
    "changes",
    [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 8}}, {"target_modules": ".*proj"},
     {"peft_type": "LOHA"}, {"use_rslora": True}, {"lora_dropout": 0.1}],
)  # fmt: skip
def test_an_adapter_that_is_not_plain_is_refused(tmp_path, changes):
    (problem,) = LoraSettings(from_folder=saved(tmp_path, **changes)).problems(Run())
    assert next(iter(changes)) in problem


def test_what_is_missing_is_said_before_the_start(tmp_path, monkeypatch):
    (problem,) = LoraSettings(from_folder=tmp_path).problems(Run())
    assert "adapter_config.json cannot be read" in problem
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(LoraSettings().problems(Run())) == [
        "adapter needs the library peft, which is not installed: pip install 'areal-fsdp[lora]'"
    ]


class Engine(Settings):
    model_config = ConfigDict(extra="allow")


def chosen(name, **settings):
    return Selection("inference_engines", f"{name}/{name}", Engine(**settings), reference=name)


class Published(Run):
    class publication:
        transport = "memory"

    inference_engine = chosen("vllm", adapter_rank=8)


def test_who_publishes_an_adapter_alone_needs_servers_that_take_it():
    assert list(LoraSettings(rank=8, publish="alone").problems(Published())) == []
    (problem,) = LoraSettings(rank=9, publish="alone").problems(Published())
    assert "set inference_engine.adapter_rank=9" in problem
    other = Published()
    other.publication = type("Section", (), {"transport": "broadcast"})
    (problem,) = LoraSettings(rank=8, publish="alone").problems(other)
    assert "publication.transport" in problem
    other.inference_engine = chosen("vllm", adapter_rank=None)
    assert "rank 0 at most: set inference_engine.adapter_rank=16" in next(LoraSettings(publish="alone").problems(other))
    other.inference_engine = chosen("hf", threads=1)
    (problem, _) = LoraSettings(publish="alone").problems(other)
    assert problem.endswith("hf takes no adapters: set adapter.publish to merged, or take servers of vllm or sglang")


def test_a_pipe_and_what_is_nested_too_deeply_are_no_adapter(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "adapter_config.json").write_text('{"r":' * 100_000)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapter_config.json")
    for name, words in (("deep", "recursion depth"), ("pipe", "it is no file")):
        (problem,) = LoraSettings(from_folder=tmp_path / name).problems(Run())
        assert words in problem
        assert problem.count("name a folder with") == 1


@pytest.mark.parametrize("changes", [{"r": 0}, {"r": 8.9}, {"lora_alpha": float("nan")}, {"target_modules": [3]}])
def test_sizes_of_a_folder_that_mean_nothing_are_refused(tmp_path, changes):
    saved(tmp_path, **changes)
    (told,) = LoraSettings(from_folder=tmp_path).problems(Run())
    assert "adapter_config.json cannot be read" in told


def test_an_adapter_is_not_laid_over_the_export_with_which_it_is_merged(tmp_path):
    (tmp_path / "adapter").mkdir()
    saved(tmp_path / "adapter")

    class Again(Run):
        model = SimpleNamespace(path=str(tmp_path))

    (told,) = LoraSettings(from_folder=tmp_path / "adapter").problems(Again())
    assert "is merged already: set model.path to the model that it was trained on" in told
