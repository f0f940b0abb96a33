"""The records lead to what exists, configs need no torch, presets are whole, and mistakes are found before a start."""

import pytest

from areal_core.config import resolve
from areal_core.config.needs import roles_of
from areal_core.engines import ModelReference
from areal_core.errors import ConfigError
from areal_core.runs.trainer import build_engines
from areal_core.sdk import ACTOR, CRITIC
from areal_testing.conformance import PluginSuite

GENERATES = ("workflow=single_turn", "inference_engine=parts.py:Engine")


class TestPlugin(PluginSuite):
    plugin = "finetuning"


@pytest.mark.parametrize(
    ("preset", "algorithm", "roles"),
    [
        ("sft", "sft", ["actor"]),
        ("dpo", "dpo", ["actor", "reference"]),
        ("kto", "kto", ["actor", "reference"]),
        ("reward_model", "reward_model", ["reward"]),
        ("distill", "distill", ["actor", "teacher"]),
        ("sdpo", "sdpo", ["actor", "self_teacher"]),
    ],
)
def test_a_preset_is_whole(preset, algorithm, roles, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(f"finetuning/{preset}", environment={}).config
    assert config.algorithm.target == f"finetuning/{algorithm}"
    assert list(roles_of(config.algorithm, 1)) == roles
    assert list(config.cross_notes()) == []


def test_only_a_reference_that_is_asked_is_loaded(read):
    assert list(roles_of(read("algorithm=dpo", "algorithm.reference_free=true").algorithm, 1)) == ["actor"]
    assert list(roles_of(read("algorithm=ipo", "roles.reference.path=other").algorithm, 4)) == ["actor", "reference"]
    assert all(list(roles_of(read(f"algorithm={name}").algorithm, 4)) == ["actor"] for name in ("simpo", "orpo"))
    (role,) = roles_of(read("algorithm=reward_model").algorithm, 1).values()
    assert (role.head, role.trains) == ("scalar", True)


def test_defaults_are_those_of_the_papers(read):
    dpo, ipo = (read(f"algorithm={name}").algorithm.settings for name in ("dpo", "ipo"))
    assert (dpo.loss, dpo.beta, dpo.label_smoothing, dpo.length_normalized) == ("sigmoid", 0.1, 0.0, False)
    assert (ipo.loss, ipo.beta, ipo.length_normalized) == ("ipo", 0.1, False)
    assert read("algorithm=reward_model").algorithm.settings.centering == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=dpo", "algorithm.beta=0"), r"algorithm\.beta"),
        (("algorithm=dpo", "algorithm.label_smoothing=0.5"), r"algorithm\.label_smoothing"),
        (
            ("algorithm=ipo", "algorithm.label_smoothing=0.1"),
            "label_smoothing works only with loss: sigmoid, but loss is ipo",
        ),
        (("algorithm=simpo", "algorithm.gamma=-1"), r"algorithm\.gamma"),
        (("algorithm=orpo", "algorithm.weight=0"), r"algorithm\.weight"),
        (("algorithm=kto", "algorithm.desirable_weight=-1"), r"algorithm\.desirable_weight"),
        (("algorithm=dpo", "algorithm.loss=hinge"), r"algorithm\.loss"),
        (("algorithm=reward_model", "algorithm.centering=-1"), r"algorithm\.centering"),
        (("algorithm=sft", "algorithm.example_tokenizer.max_tokens=1"), r"algorithm\.example_tokenizer\.max_tokens"),
        (("algorithm=distill", *GENERATES), "roles.teacher.path: is required"),
        (("algorithm=distill", *GENERATES, "roles.teacher={}"), "roles.teacher.path: is required"),
        (("algorithm=distill", "roles.teacher.path=large"), "nothing generates: set workflow and inference_engine"),
    ],
)
def test_mistakes_are_found(overrides, message, read):
    with pytest.raises(ConfigError, match=message):
        read(*overrides)


def test_distillation_needs_the_plugin_of_its_corrections_alone(read):
    wanted = ("algorithm=distill", "roles.teacher.path=large", *GENERATES)
    usual = read(*wanted)
    assert [each.target for each in usual.algorithm.settings.corrections] == ["grpo/token_truncate"]
    assert "grpo" in usual.plugins
    without = read(*wanted, "plugins=[finetuning]", "algorithm.corrections=[]")
    assert without.algorithm.settings.corrections == []
    assert without.plugins == ["finetuning"]


@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [
        ("sft", 2e-5),
        ("dpo", 5e-7),
        ("ipo", 5e-7),
        ("simpo", 6e-7),
        ("orpo", 8e-6),
        ("kto", 5e-7),
        ("reward_model", 1e-5),
        ("distill", 1e-5),
        ("gkd", 1e-5),
        ("sdpo", 1e-6),
    ],
)
def test_an_engine_without_a_learning_rate_gets_the_algorithms(algorithm, rate, read, tmp_path):
    generates = GENERATES if algorithm in ("distill", "gkd") else ()
    if algorithm == "sdpo":
        generates = ("workflow=finetuning/self_distillation", "rollout.group_size=2", GENERATES[1])
    words = [f"algorithm=finetuning/{algorithm}", *generates]
    if algorithm in ("distill", "gkd"):
        words.append("roles.teacher.path=teacher")
    assert read(*words).steps == 1
    resolved = resolve("run.yaml", overrides=words, environment={})
    engines = build_engines(resolved, ModelReference("tiny"), {"actor": ACTOR, "critic": CRITIC}, 1.0)
    assert (engines["actor"].rate, engines["critic"].rate) == (rate, 10 * rate)
