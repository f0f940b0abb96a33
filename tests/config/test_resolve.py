"""From files, presets, environment and command line to one config: precedence, origins, selections, errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_config_is_resolved_with_the_plugins_that_it_names(kit):
    assert kit.shown("resolved.plugins.names, config.plugins") == "['kit'] ['kit']"
    assert kit.shown("config.train_engine.settings.learning_rate, config.rewards[0].common.weight") == "0.0003 2.0"
    assert kit.shown("config.algorithm.settings.advantage.target") == "kit/grouped"


def test_precedence_and_the_origin_of_each_value(kit):
    kit.file("over.yaml", "preset: kit/small\nsteps: 6\nseed: 1\nalgorithm: {clip: 0.3}\n")
    out = kit.resolve(
        "sampling.temperature=0.7",
        config="over.yaml",
        then="print(config.steps, config.seed, config.sampling.temperature, config.rollout.group_size);"
        "[print(path, resolved.origins[path]) for path in ('steps', 'seed', 'sampling.temperature', 'model.path',"
        "'rollout.group_size', 'rollout.batch_size', 'train_engine.learning_rate', 'algorithm.clip', 'algorithm.type',"
        "'rewards.0.weight', 'rewards.0.name')]",
        AREAL_SET="seed=2 rollout.group_size=4 sampling.temperature=0.9",
    )
    assert out.splitlines() == [
        "6 2 0.7 4",
        "steps over.yaml:2",
        "seed AREAL_SET",
        "sampling.temperature command line",
        "model.path preset kit/small:2",
        "rollout.group_size AREAL_SET",
        "rollout.batch_size default",
        "train_engine.learning_rate preset kit/small:8",
        "algorithm.clip over.yaml:4",
        "algorithm.type preset kit/small:9",
        "rewards.0.weight preset kit/small:6",
        "rewards.0.name default",
    ]


@pytest.mark.parametrize(
    ("override", "expression", "value"),
    [
        ("train_engine.learning_rate=3e-3", "config.train_engine.settings.learning_rate", "0.003"),
        ("dataset.name=on", "config.dataset.settings.name", "on"),
        ("rewards.0.weight=3", "config.rewards[0].common.weight", "3.0"),
        ("rewards=[{type: kit/exact, name: a}, kit/exact]", "[r.common.name for r in config.rewards]", "['a', None]"),
        ("rewards=null", "config.rewards", "[]"),
        ("algorithm.advantage=kit/plain", "config.algorithm.settings.advantage.target", "kit/plain"),
        ("algorithm.advantage.scale=false", "config.algorithm.settings.advantage.settings.scale", "False"),
        ("algorithm.extras=[kit/plain]", "config.algorithm.settings.extras[0].target", "kit/plain"),
        ("evaluation.dataset=kit/rows", "config.evaluation.every, config.evaluation.dataset.target", "10 kit/rows"),
        ("train_engine.betas=[0.8, 0.9]", "config.train_engine.settings.betas", "(0.8, 0.9)"),
        ("run_dir=there", "resolved.run_dir", "there"),
        ("sampling.stop=['=', x]", "config.sampling.stop", "['=', 'x']"),
    ],
)
def test_overrides(kit, override, expression, value):
    assert kit.shown(expression, override) == value


@pytest.mark.parametrize(
    ("words", "expression", "value"),
    [
        (("evaluation.dataset=kit/rows", "evaluation=null"), "config.evaluation", "None"),
        (("evaluation=null", "evaluation.dataset=kit/rows"), "config.evaluation.dataset.target", "kit/rows"),
        (
            ("evaluation.dataset=kit/rows", "evaluation=null", "evaluation.dataset=kit/rows"),
            "config.evaluation.every",
            "10",
        ),
        (("dataset.count=2", "dataset.count=null", "dataset.count=3"), "config.dataset.settings.count", "3"),
    ],
)
def test_null_clears_what_was_written_before_it(kit, words, expression, value):
    assert kit.shown(expression, *words) == value


def test_changing_the_type_starts_the_section_afresh_whatever_the_order_of_words(kit):
    kit.file("one.py", "class Mine:\n    def __init__(self, clip: float = 1.0): ...\n")
    words = ["algorithm.clip=0.5", "algorithm.type=one.py:Mine"]
    assert kit.shown("config.algorithm.settings", *words) == "{'clip': 0.5}"
    kit.file("with.yaml", "preset: kit/small\nalgorithm: {type: one.py:Mine}\n")
    assert kit.shown("config.algorithm.settings", config="with.yaml") == "{}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rewards.7.weight=1", "command line: rewards.7.weight: rewards is a list with 1 item, none with number 7"),
        ("rewards.x.weight=1", "rewards is a list with 1 item: name one by its number, from 0"),
        ("steps.x=1", "steps is a single value, it has no part 'x'"),
        ("steps=", "the value of steps is empty; write null to clear it, '' for an empty text"),
        ("steps=[", "the value of steps is not a YAML scalar or flow list"),
        ("dataset.name=a: b", "the value of dataset.name is neither a scalar nor a flow list"),
        ("1x=3", "'1x' is not a key; write section.key=value"),
        (
            "train_engine.learning_rte=1",
            "command line: train_engine.learning_rte: unknown key\n  did you mean 'learning_rate'?",
        ),
        ("stepz=1", "command line: stepz: unknown key\n  did you mean 'steps'?"),
        ("steps=off", "command line: steps: must be a"),
        ("workflow.depth=3", "workflow.depth: unknown key\n  'kit/single' takes no settings"),
        ("rewards.0.wieght=3", "rewards.0.wieght: unknown key\n  did you mean 'weight'?"),
        ("model.source=kit/rows", "supplies no model named 'rows'\n  'kit/rows' is a data set, not a model"),
        ("model.path=null", "model: give exactly one of path (a folder or hub name) and source"),
    ],
)
def test_wrong_overrides(kit, override, told):
    out = kit.resolve(override)
    assert out.startswith(("ConfigError 2\n", "ComponentNotFoundError 2\n", "PluginError")), out
    assert told in out


def test_all_problems_are_told_at_once_with_their_places(kit):
    kit.file(
        "bad.yaml",
        """\
        stepz: 5
        model: {path: tiny, dtype: float16}
        dataset: kit/rowz
        workflow: kit/single
        rewards:
          - {type: kit/exact, weight: heavy}
        inference_engine: {type: kit/generator, threads: 0}
        train_engine: hf/engine
        algorithm: {type: kit/policy, advantage: {type: kit/grouped, scael: true}}
        launcher: grpo/here
        """,
    )
    out = kit.resolve(config="bad.yaml")
    assert out.startswith("ConfigError 2\n8 problems in bad\n"), out
    for told in (
        "no plugins named 'hf', 'grpo' are installed\n"
        "    install them with: pip install ./plugins/areal_hf ./plugins/areal_grpo (in a clone of areal)\n",
        "bad.yaml:2: model.dtype: must be 'float32' or 'bfloat16', not 'float16'\n",
        "bad.yaml:3: dataset.type: plugin kit (areal-kit 1.2.3) supplies no data set named 'rowz'\n    did you mean",
        "bad.yaml:6: rewards.0.weight: must be a number, not 'heavy'\n",
        "bad.yaml:7: inference_engine.threads: must be greater than or equal to 1, not 0\n",
        "bad.yaml:9: algorithm.advantage.scael: unknown key\n    did you mean 'scale'?",
        "bad.yaml:1: stepz: unknown key\n    did you mean 'steps'?",
        "steps: is required\n    Number of training steps.",
    ):
        assert told in out, told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["training.num_minibatches=3"],
            "training.num_minibatches: 3 does not divide rollout.batch_size, which is 16",
        ),
        (["rollout.group_size=1"], "algorithm.advantage: 'kit/grouped' compares the answers to one prompt"),
        (["algorithm.kl=0.1"], "algorithm: kl is set, and there is no evaluation"),
        (
            ["sampling.top_p=0.9", "sampling.top_k=5"],
            "the trainer cannot reproduce the probabilities of top_p=0.9, top_k=5",
        ),
        (["inference_engine=null"], "inference_engine: is required beside a workflow"),
        (["workflow=null"], "workflow: is required beside an inference_engine"),
        (["sampling.min_new_tokens=300"], "300 is more than max_new_tokens, 256"),
    ],
)
def test_mistakes_that_show_only_together(kit, words, told):
    assert told in kit.resolve(*words)


def test_cross_checks_are_told_together_and_can_be_answered(kit):
    out = kit.resolve("rollout.group_size=1", "algorithm.kl=0.1", "training.num_minibatches=5")
    assert out.startswith("ConfigError 2\n3 problems in run\n")
    assert kit.resolve("sampling.top_p=0.9", "sampling.allow_mismatched_sampling=true") == "valid\n"
    assert kit.resolve("rollout.group_size=1", "algorithm.advantage=kit/plain") == "valid\n"
    assert kit.resolve("algorithm.kl=0.1", "evaluation={dataset: kit/rows}") == "valid\n"


def test_a_secret_is_named_never_written_and_never_told(kit):
    out = kit.resolve("trackers=[{type: kit/remote, token: hunter2}]")
    assert "trackers.0.token: a secret is named by an environment variable, written env:NAME" in out
    assert "hunter2" not in out
    out = kit.resolve("trackers=[{type: kit/remote, tokn: hunter2}]")
    assert "trackers.0.tokn: unknown key" in out
    assert "hunter2" not in out
    override = "trackers=[{type: kit/remote, token: env:TOKEN}]"
    then = "token = config.trackers[0].settings.token; print(token, token.get(), 'hunter2' in resolved.to_yaml())"
    assert kit.resolve(override, then=then, TOKEN="hunter2") == "Secret(reference='env:TOKEN') hunter2 False\n"
    assert "the environment variable TOKEN, which the config names as a secret, is not set" in kit.resolve(
        override, then=then
    )


def test_plugins_from_config_command_line_and_environment_are_united(kit):
    kit.plugin("one")
    kit.plugin("two")
    kit.plugin("three")
    kit.file("run.yaml", (kit.work / "run.yaml").read_text() + "plugins: [one]\n")
    names = kit.shown("config.plugins", plugins=["two"], AREAL_PLUGINS="three")
    assert names == "['two', 'three', 'one', 'kit']"
    assert "plugins: must be a list of plugin names" in kit.resolve("plugins=3")


def test_a_plugin_that_several_keys_name_and_that_cannot_be_loaded_is_reported_once(kit):
    kit.plugin("broken", "raise RuntimeError('boom')")
    out = kit.resolve("dataset=broken/rows", "launcher=broken/local", "seed=x", plugins=["broken"])
    assert out.startswith("ConfigError 2\n2 problems in run\n"), out
    assert out.count("boom") == 1


def test_presets(kit):
    assert kit.shown("config.steps, resolved.name", config=None, plugins=["kit"]) == "5 small"
    assert kit.shown("config.steps, resolved.name", config="kit/small") == "5 small"
    out = kit.resolve(config="kit/needy")
    assert (
        "PluginMissingError 2\nno plugins named 'hf', 'mine' are installed\n"
        "  install them with: pip install ./plugins/areal_hf (in a clone of areal)\n" in out
    )
    kit.plugin("bare")
    assert kit.shown("config.steps, resolved.name", config=None, plugins=["bare", "kit"]) == "5 small"
    for names in (["kit", "typo"], ["typo", "kit"]):
        out = kit.resolve("stepz=3", config=None, plugins=names)
        assert "'typo'" in out
        assert "stepz" in out, "all mistakes are told at once"
    assert "no plugin named 'typo' is installed" in kit.resolve(config=None, plugins=["typo"])
    out = kit.resolve(config=None, plugins=["bare"])
    assert out == (
        "UsageError 2\nno default preset in bare, and no config file is named\n"
        "  name a config file or a preset: areal run CONFIG\n"
        "  presets: kit/needy (needs others), kit/small (a small run)\n"
    )
    assert "nothing to run" in kit.resolve(config=None)
    assert "there is no config file 'small'" not in kit.resolve(config="small", plugins=["kit"])
    assert (
        "there is no config file 'smal', and the loaded plugins supply no preset named 'smal'\n"
        "  did you mean 'kit/small'?" in (kit.resolve(config="smal", plugins=["kit"]))
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "bad.yaml:2: not valid YAML"),
        ("a: 1\na: 2", "bad.yaml:2: the key 'a' occurs twice"),
        ("- 1", "bad.yaml: a config is a mapping of sections, not a list"),
        (
            "seed: !!python/name:os.system 1",
            "bad.yaml:1: the tag tag:yaml.org,2002:python/name:os.system is not allowed",
        ),
        ("a: &x [*x]", "bad.yaml:1: more than 40 levels are nested here, or an alias contains itself"),
        ("? [x]\n: 1", "bad.yaml:1: a key must be a plain word"),
    ],
)
def test_files_that_are_no_configs(kit, text, told):
    kit.file("bad.yaml", text + "\n")
    out = kit.resolve(config="bad.yaml")
    assert told in out, out


def test_a_file_that_is_not_there(kit):
    assert (
        kit.resolve(config="rum.yaml") == "UsageError 2\nthere is no config file rum.yaml\n  did you mean run.yaml?\n"
    )
    told = kit.resolve(config="nowhere/rum.yaml")
    assert "did you mean run.yaml?" in told, "what is named is there"


def test_a_run_folder_gives_back_an_equal_config_without_the_environment(kit):
    kit.file("mine.py", "def reward(answer: str, *, scale: float = 1.0): ...\n")
    then = (
        "folder = Path('run'); folder.mkdir(); (folder / 'config.yaml').write_text(resolved.to_yaml());"
        "again = load_run(folder); print(again.config == config, again.base_dir == resolved.base_dir,"
        "again.to_yaml() == resolved.to_yaml(), again.files == resolved.files, again.config.plugins)"
    )
    words = [
        "rewards=[{type: mine.py:reward, scale: 2}, kit/exact]",
        "dataset.name='3e-4'",
        "algorithm.other=kit/plain",
    ]
    out = kit.resolve(*words, then=then, plugins=["kit"], AREAL_SET="seed=7")
    assert out == "True True True True ['kit']\n"
    out = kit.python(
        "from areal_core.config import load_run\nfrom pathlib import Path\n"
        "c = load_run(Path('run')).config; print(c.seed, c.plugins, c.dataset.settings.name)",
        AREAL_SET="seed=8",
        AREAL_PLUGINS="",
    )
    assert out.out == "7 ['kit'] 3e-4\n"


def test_resolving_imports_no_target_and_no_torch(kit):
    then = "import sys; print('kit_package.parts' in sys.modules, 'torch' in sys.modules)"
    assert kit.resolve(then=then) == "False False\n"


def test_choices_are_walked_with_their_paths(kit):
    paths = json.loads(kit.shown("__import__('json').dumps(['.'.join(map(str, p)) for p, s in selections(config)])"))
    assert paths == [
        "dataset",
        "workflow",
        "rewards.0",
        "inference_engine",
        "weight_sync.transport",
        "train_engine",
        "algorithm",
        "algorithm.advantage",
        "launcher",
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=99999999999999999999999999999999999999", "seed: must be less than 9223372036854775808, not 9999"),
        (
            "training.phase_timeout_s=1e300",
            "training.phase_timeout_s: must be less than or equal to 31622400, not 1e+300",
        ),
        ("checkpoint.every_s=1e9", "checkpoint.every_s: must be less than or equal to 31622400, not 1000000000.0"),
    ],
)
def test_numbers_that_no_clock_or_generator_takes_are_refused(kit, override, told):
    assert told in kit.resolve(override)


def test_every_span_of_time_is_bounded():
    from areal_core.config import sections
    from areal_core.config.settings import Section

    models = [each for each in vars(sections).values() if isinstance(each, type) and issubclass(each, Section)]
    spans = {name: field for model in models for name, field in model.model_fields.items() if name.endswith("_s")}
    assert len(spans) == 8
    assert [name for name, field in spans.items() if "Le(le=" not in str(field.metadata)] == []


def test_a_temperature_is_one_that_logits_can_be_divided_by(kit):
    assert "sampling.temperature: must be greater than or equal to 0.01, not 1e-320" in kit.resolve(
        "sampling.temperature=1e-320"
    )
    evaluation = "evaluation={{dataset: kit/rows, temperature: {}}}"
    told = kit.resolve(evaluation.format("1e-320"))
    assert "evaluation.temperature: must be at least 0.01, or 0, which is greedy, not 1e-320" in told
    assert kit.shown("config.evaluation.temperature", evaluation.format(0)) == "0.0"


def test_true_is_no_number(kit):
    assert "steps: must be a number, not true" in kit.resolve("steps=true")
    assert "rollout.episode_timeout_s: must be a number, not true" in kit.resolve("rollout.episode_timeout_s=true")
    assert "train_engine.learning_rate: must be a number, not true" in kit.resolve("train_engine.learning_rate=true")
    told = kit.resolve("evaluation={dataset: kit/rows, limit: false}")
    assert "evaluation.limit: must be a number, not false" in told
    assert kit.shown("config.shuffle", "shuffle=false") == "False"


def test_a_key_of_another_framework_is_named_though_another_one_is_spelled_like_it():
    from areal_core.config.problems import unknown_key

    assert unknown_key(("clip_ratio_low",), ["clip_ratio"]).hints[0] == "areal calls it policy_loss.clip_low"
    assert unknown_key(("group_filter",), ["group_filters"]).hints[0] == "did you mean 'group_filters'?"


LOCATED = """
steps: 1
model: {path: /m}
dataset: {type: "parts.py:Rows", path: rows.txt}
train_engine: parts.py:Part
algorithm: parts.py:Part
"""


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder with a config, and a folder `parts` in it with a component that has a path among its settings."""
    from areal_core.config import resolve

    parts = "from areal_core.config import LocalPath\nclass Part: ...\n"
    parts += "class Rows:\n    def __init__(self, path: LocalPath): ...\n"
    for folder in (tmp_path / "configs", tmp_path / "configs" / "parts", tmp_path / "current"):
        folder.mkdir()
        (folder / "parts.py").write_text(parts)
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("HOME", str(tmp_path / "configs"))

    def folders(text, *overrides):
        (tmp_path / "configs" / "run.yaml").write_text(LOCATED + text)
        resolved = resolve(tmp_path / "configs" / "run.yaml", overrides=overrides, environment={}, imports=True)
        path, target = resolved.config.dataset.settings["path"], Path(resolved.config.dataset.target)
        return {os.path.relpath(folder, tmp_path) for folder in (path.parent, target.parent, resolved.base_dir)}

    return folders


@pytest.mark.parametrize(
    ("text", "overrides", "folder"),
    [
        ("", (), "configs"),
        ("base_dir: parts", (), "configs/parts"),
        ("base_dir: ~/parts", (), "configs/parts"),
        ("base_dir: null", (), "configs"),
        ("", ("base_dir=parts",), "configs/parts"),
        ("base_dir: /nowhere", ("further.yaml",), "configs/parts"),
        ("base_dir: parts", ("base_dir=null",), "configs"),
    ],
)
def test_every_relative_path_starts_from_base_dir(configs, text, overrides, folder):
    Path("further.yaml").write_text("base_dir: parts\n")
    assert configs(text, *overrides) == {folder}


def test_a_base_dir_that_is_no_text(configs):
    from areal_core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"run.yaml:7: base_dir: must be the path of a folder"):
        configs("base_dir: 5")


@pytest.mark.parametrize("key", ["preset: kit/needy", "base_dir: parts"])
def test_a_preset_with_a_key_that_is_for_configs_only(kit, key):
    file = kit.site / "kit_package" / "small.yaml"
    file.write_text(f"{file.read_text()}\n{key}\n")
    name = key.partition(":")[0]
    assert kit.resolve(config=None, plugins=["kit"]) == (
        "PluginBrokenError 2\nthe preset 'kit/small' of plugin kit (areal-kit 1.2.3) "
        f"has the key '{name}', which is for configs only\n  remove it from {file}\n"
    )
