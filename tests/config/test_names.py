"""Names of components: two plugins may use one, and a bare name means what its place says."""

from __future__ import annotations

import pytest

MINE = """
@hookimpl
def areal_reward_functions():
    return [Component("exact", "mine", target="{package}.parts:exact"),
            Component("single", "mine", target="{package}.parts:exact")]

@hookimpl
def areal_advantages():
    return [Component("plain", "mine", target="{package}.parts:exact")]

@hookimpl
def areal_algorithms():
    return [Component("learns", "mine", target="{package}.parts:exact", config="{package}.settings:LearnsSettings")]

@hookimpl
def areal_workflows():
    return [Component("single_turn", "mine", target="{package}.parts:exact")]

@hookimpl
def areal_presets():
    return [Preset("small", "of {package}", path="{package}:small.yaml", plugins=("kit",), default=True)]
"""

SETTINGS = """
from areal_core.config import Selection, Settings, component

class LearnsSettings(Settings):
    advantage: Selection = component("advantages", default="plain")
    core: Selection = component("loss_aggregations", default={"type": "constant_length", "length": 1})
    several: list[Selection] = component("advantages", default=["plain", "grouped"])
    other: Selection | None = component("advantages")
"""

SMALL = """
steps: 7
model: {path: tiny}
dataset: kit/rows
workflow: single_turn
rewards: [exact, {type: exact, name: again, weight: 3}]
inference_engine: kit/generator
train_engine: engine
algorithm: learns
"""


@pytest.fixture
def majority(kit):
    """A third party's plugin, which calls things as `kit` and the core do."""
    files = {"settings.py": SETTINGS, "parts.py": "def exact(answer): ...", "small.yaml": SMALL}
    kit.plugin("majority", MINE.format(package="majority_package"), modules=files)
    return kit


AMBIGUOUS = (
    "the reward function 'exact' is supplied by plugin kit (areal-kit 1.2.3) and by plugin majority "
    "(areal-majority 1.2.3)\n  write its full name: kit/exact or majority/exact\n"
)


def test_a_collision_is_no_matter_of_runs_that_use_neither(majority):
    assert majority.resolve("rewards=[]", plugins=["majority"]) == "valid\n"
    assert majority.resolve("algorithm.advantage=kit/plain", plugins=["majority"]) == "valid\n"


def test_either_is_chosen_by_its_full_name_and_the_bare_one_is_an_error_where_it_stands(majority):
    assert majority.shown("config.rewards[0].target", "rewards=[majority/exact]") == "majority/exact"
    out = majority.resolve("rewards=[kit/exact, exact]", plugins=["majority"])
    assert out == "ConfigError 2\ncommand line: rewards.1.type: " + AMBIGUOUS
    majority.file("bad.yaml", "preset: kit/small\nplugins: [majority]\nseed: 1\nrewards:\n  - exact\nstepz: 1\n")
    out = majority.resolve(config="bad.yaml")
    assert out.startswith("ConfigError 2\n2 problems in bad\n")
    assert "  bad.yaml:5: rewards.0.type: " + AMBIGUOUS.replace("\n  ", "\n    ") in out


def test_a_plugin_that_is_named_late_makes_a_bare_name_ambiguous_too(majority):
    assert majority.resolve("rewards=[exact]") == "valid\n"
    out = majority.resolve("rewards=[exact]", "algorithm.advantage=majority/plain")
    assert out == "ConfigError 2\ncommand line: rewards.0.type: " + AMBIGUOUS


def test_the_bare_names_in_a_preset_and_in_default_settings_mean_the_plugins_own(majority):
    shown = (
        "[config.workflow.target, *(r.target for r in config.rewards), config.train_engine.target,"
        "config.algorithm.target, *(s.target for p, s in selections(config.algorithm))]"
    )
    expected = (
        "['majority/single_turn', 'majority/exact', 'majority/exact', 'kit/engine', 'majority/learns', "
        "'majority/learns', 'majority/plain', 'core/constant_length', 'majority/plain', 'kit/grouped']"
    )
    assert majority.shown(shown, config="majority/small") == expected
    majority.plugin("third", MINE.format(package="third_package"), modules={"settings.py": SETTINGS})
    assert majority.shown(shown, config="majority/small", plugins=["third"]) == expected
    majority.file("over.yaml", "preset: majority/small\nrewards: [exact]\n")
    assert AMBIGUOUS in majority.resolve(config="over.yaml")
    out = majority.resolve("algorithm.other=plain", config="majority/small")
    assert "algorithm.other.type: the advantage 'plain' is supplied by plugin kit" in out
    assert majority.shown("config.rewards[1].target", "rewards.1.weight=4", config="majority/small") == "majority/exact"


def test_a_run_folder_holds_full_names_and_is_read_with_any_plugins(majority):
    then = (
        "folder = Path('run'); folder.mkdir(); (folder / 'config.yaml').write_text(resolved.to_yaml());"
        "again = load_run(folder, plugins=['third']); print(again.config.rewards == config.rewards,"
        "again.config.algorithm == config.algorithm, config.workflow.target)"
    )
    majority.plugin("third", MINE.format(package="third_package"), modules={"settings.py": SETTINGS})
    assert majority.resolve(config="majority/small", then=then) == "True True majority/single_turn\n"


def test_presets_of_one_name_are_written_in_full(majority):
    assert majority.shown("config.steps, resolved.name", config="majority/small", plugins=["kit"]) == "7 small"
    assert majority.shown("config.steps", config=None, plugins=["majority", "kit"]) == "7"
    out = majority.resolve(config="small", plugins=["kit", "majority"])
    assert "the preset 'small' is supplied by plugin kit (areal-kit 1.2.3) and by plugin majority" in out
    assert "  write its full name: kit/small or majority/small\n" in out
    assert majority.shown("config.steps", config="small", plugins=["kit"]) == "5"


def test_settings_made_by_hand_find_the_core_and_the_current_folder(kit):
    kit.file("mine.py", "def centered(batch): ...\n")
    out = kit.python(
        """
        from pathlib import Path
        from areal_core.config import LocalPath, Selection, Settings, component
        class Mine(Settings):
            path: LocalPath = Path("data")
            how: Selection = component("loss_aggregations", default="token_mean")
            which: Selection | None = component("advantages")
        made = Mine(which="mine.py:centered")
        print(made.path == Path.cwd() / "data", made.how.target, made.which.target.endswith("/mine.py:centered"))
        print(Mine(which="kit/plain").which.target, Mine(how=made.how).how is made.how)
        try:
            Mine(which="plain")
        except ValueError as error:
            print("plain" in str(error))
        """
    )
    assert out.out.splitlines() == ["True core/token_mean True", "kit/plain True", "True"], out.err


def test_a_path_in_settings_is_relative_to_the_config(kit):
    kit.file(
        "deep/parts.py",
        """
        from areal_core.config import LocalPath, Settings
        class Rows:
            class Config(Settings):
                path: LocalPath
        """,
    )
    kit.file("deep/run.yaml", "preset: kit/small\ndataset: {type: parts.py:Rows, path: data.txt}\n")
    shown = kit.shown("config.dataset.settings.path", config="deep/run.yaml")
    assert shown == f"{kit.work}/deep/data.txt"


NAMESAKE = """
@hookimpl
def areal_advantages():
    return [Component("mean", "the mean", target="PLUGIN_package.parts:mean")]
"""
PRESET = """
@hookimpl
def areal_presets():
    return [Preset("small", "a small run", path="first_package:small.yaml")]
"""
METHOD = """
from areal_core.config import Selection, Settings, component

def mean(batch): return 0

class Method:
    class Config(Settings):
        advantage: Selection = component("advantages")
        others: list[Selection] = component("advantages", default=[])

    def __init__(self, settings): pass
"""


def test_a_bare_name_in_a_preset_means_the_same_to_the_process_that_reads_unread_settings(kit):
    """It means the preset's own plugin; in the config of that process, nothing said whose preset the name was from."""
    method = "algorithm: {type: first_package.parts:Method, advantage: mean, others: [{type: mean}]}"
    preset = (kit.work / "run.yaml").read_text().replace("algorithm: kit/policy", method)
    for name, records, modules in (("first", NAMESAKE + PRESET, {"small.yaml": preset}), ("second", NAMESAKE, {})):
        kit.plugin(name, records.replace("PLUGIN", name), modules={"parts.py": METHOD, **modules})
    shown = kit.areal("config", "show", "first/small", "--plugins", "first,second")
    assert shown.code == 0, shown.err
    assert shown.out.count("type: first/mean") == 2
    refused = kit.areal("config", "show", "first/small", "--plugins", "first,second", "algorithm.advantage=mean")
    assert "'mean' is supplied by plugin first (areal-first 1.2.3) and by plugin second" in refused.err
