"""A plugin adds a kind and hooks, and another one implements them: both are installed, as far as Python can tell."""

from __future__ import annotations

import json

import pytest

CURRICULUM = """
from areal_core.plugins import Kind
from curriculum_package.kinds import SCHEDULES

@hookimpl
def areal_add_kinds():
    return [SCHEDULES]

@hookimpl
def areal_add_hooks():
    from curriculum_package import hooks
    return hooks

@hookimpl
def areal_curriculum_schedules():
    return Component("constant", "the same stage for ever", target="curriculum_package.parts:constant")

@hookimpl
def areal_datasets():
    return [Component("staged", "rows by stage", target="curriculum_package.parts:Staged",
                      config="curriculum_package.settings:StagedSettings")]

@hookimpl
def areal_step_finished(hook, step):
    veto = hook.areal_curriculum_may_advance(stage=step)
    hook.areal_curriculum_stage_changed(stage=step if veto is None else 0)
"""
HOOKS = """
from areal_core.plugins import hookspec

@hookspec
def areal_curriculum_schedules(): "Supply schedules."

@hookspec
def areal_curriculum_stage_changed(stage): "The curriculum has reached a stage."

@hookspec(firstresult=True)
def areal_curriculum_may_advance(stage): "Return False to stay; the first answer counts."
"""
KINDS = """
from areal_core.plugins import Kind

SCHEDULES = Kind("curriculum_schedules", "schedule")
"""
SETTINGS = """
from areal_core.config import Selection, Settings, component
from curriculum_package.kinds import SCHEDULES

class StagedSettings(Settings):
    schedule: Selection = component(SCHEDULES, default="constant", description="when a stage begins")
"""
PARTS = """
def constant(step): return 0

class Staged:
    def __init__(self, settings): self.schedule = settings.schedule.build()
    def __len__(self): return 3
    def __getitem__(self, index): return {"stage": self.schedule(index)}
"""
COSINE = """
@hookimpl
def areal_curriculum_schedules():
    return [Component("cosine", "slow, fast, slow", target="cosine_package.parts:cosine",
                      config="cosine_package.settings:CosineSettings")]

@hookimpl
def areal_curriculum_stage_changed(stage):
    print("stage", stage)
"""
COSINE_SETTINGS = """
from areal_core.config import Settings
from pydantic import Field

class CosineSettings(Settings):
    period: int = Field(default=100, ge=1, description="steps of a period")
"""


@pytest.fixture
def curriculum(kit):
    """The box with the plugin `curriculum`, which adds, and `cosine`, which implements; each knows only its side."""
    modules = {"hooks.py": HOOKS, "kinds.py": KINDS, "settings.py": SETTINGS, "parts.py": PARTS}
    kit.plugin("curriculum", CURRICULUM, modules=modules)
    modules = {"settings.py": COSINE_SETTINGS, "parts.py": "def cosine(step, period): return step * period\n"}
    kit.plugin("cosine", COSINE, modules=modules)
    return kit


def test_a_config_chooses_a_component_of_an_added_kind_and_its_settings_are_checked(curriculum):
    chosen = "dataset={type: curriculum/staged, schedule: {type: cosine/cosine, period: 7}}"
    rows = "[config.dataset.build()[index]['stage'] for index in range(3)]"
    assert curriculum.shown(rows, chosen) == "[0, 7, 14]"
    assert curriculum.shown(rows, "dataset=curriculum/staged") == "[0, 0, 0]"
    assert "dataset.schedule.period: must be greater than or equal to 1" in curriculum.resolve(chosen.replace("7", "0"))
    refused = curriculum.resolve("dataset={type: curriculum/staged, schedule: cosines}", plugins=["cosine"])
    assert "the loaded plugins supply no schedule named 'cosines'" in refused
    assert "did you mean 'cosine/cosine'?" in refused
    assert "available for curriculum_schedules: cosine/cosine, curriculum/constant" in refused


def test_a_plugin_that_is_not_loaded_is_proposed_for_an_added_kind(curriculum):
    curriculum.plugin("slow", COSINE.replace("cosine", "slow"))
    refused = curriculum.resolve("dataset={type: curriculum/staged, schedule: linear}")
    assert "write your own and name it by import" in refused
    refused = curriculum.resolve("dataset={type: curriculum/staged, schedule: cosin}")
    assert "did you mean 'cosine/cosine'?" in refused
    assert "'kit/exact' is a reward function, not a schedule" in curriculum.resolve(
        "dataset={type: curriculum/staged, schedule: exact}"
    )


@pytest.mark.parametrize("plugins", [["cosine"], ["cosine", "curriculum"], ["curriculum", "cosine"]])
def test_the_plugin_that_adds_a_hook_is_loaded_before_those_that_implement_it(curriculum, plugins):
    code = (
        "from areal_core.plugins import PluginManager; from pathlib import Path\n"
        f"manager = PluginManager.load({plugins})\n"
        "print(manager.names, [record.reference for record in manager.components('curriculum_schedules')])\n"
        "manager.events.step_finished(Path('run'), 4, {})\n"
        "manager.hook.areal_curriculum_stage_changed(stage=9)\n"
    )
    outcome = curriculum.python(code)
    assert outcome.err == ""
    assert outcome.out == (
        "['curriculum', 'cosine'] ['cosine/cosine', 'curriculum/constant']\nstage 4\nstage 9\n"
    )  # fmt: skip


def test_the_first_answer_of_an_added_hook_counts_where_its_specification_says_so(curriculum):
    curriculum.plugin("stay", "@hookimpl\ndef areal_curriculum_may_advance(stage):\n    return False\n")
    code = (
        "from areal_core.plugins import PluginManager; from pathlib import Path\n"
        "PluginManager.load(['cosine', 'stay']).events.step_finished(Path('run'), 4, {})\n"
    )
    assert curriculum.python(code).out == "stage 0\n"


def test_areal_plugins_shows_what_is_added_and_who_implements_it(curriculum):
    listing = curriculum.areal("plugins").out
    added = "areal_curriculum_may_advance, areal_curriculum_schedules, areal_curriculum_stage_changed"
    assert f"  adds kinds:  curriculum_schedules\n  adds hooks:  {added}\n" in listing
    assert (
        "cosine  areal-cosine 1.2.3\n  curriculum_schedules: cosine\n  event hooks:  curriculum_stage_changed\n"
        in listing
    )
    described = curriculum.areal("plugins", "cosine").out
    assert "curriculum_schedules: cosine/cosine\n  slow, fast, slow\n" in described
    assert "period: whole number from 1, default 100  (steps of a period)" in described
    assert (
        'schedule: schedule, default "constant"  (when a stage begins)' in curriculum.areal("plugins", "curriculum").out
    )
    entries = {entry["name"]: entry for entry in json.loads(curriculum.areal("plugins", "--json").out)}
    assert entries["curriculum"]["added_kinds"] == ["curriculum_schedules"]
    assert entries["curriculum"]["added_hooks"] == added.split(", ")
    schema = json.loads(curriculum.areal("config", "schema", "--plugins", "cosine").out)
    assert set(schema["x-areal-components"]["curriculum_schedules"]) == {"cosine/cosine", "curriculum/constant"}


def test_a_misspelt_hook_of_another_plugin_gets_the_same_hint(curriculum):
    curriculum.plugin("typo", COSINE.replace("areal_curriculum_schedules", "areal_curriculum_schedule"))
    outcome = curriculum.areal("plugins", "typo")
    assert "implements areal_curriculum_schedule, which is not a hook of areal-core" in outcome.out
    assert "did you mean areal_curriculum_schedules?" in outcome.out


def test_a_hook_of_a_plugin_that_is_not_installed_is_unknown_unless_it_is_optional(kit):
    kit.plugin("cosine", COSINE)
    assert "implements areal_curriculum_schedules, areal_curriculum_stage_changed, which is not a hook" in kit.areal(
        "plugins", "cosine"
    ).out  # fmt: skip
    kit.plugin("lenient", COSINE.replace("@hookimpl", "@hookimpl(optionalhook=True)"))
    assert kit.areal("plugins", "lenient").code == 0


def test_two_plugins_that_implement_each_others_hooks_do_not_wait_for_one_another(box):
    records = "@hookimpl\ndef areal_{0}_event(): ...\n"
    box.plugin("one", records.format("two"))
    box.plugin("two", records.format("one"))
    for name, other in (("one", "two"), ("two", "one")):
        assert f"implements areal_{name}_event, which is not a hook" in box.areal("plugins", name).out, other


KIND = "from areal_core.plugins import Kind\n@hookimpl\ndef areal_add_kinds():\n    return Kind('NAME', 'one')\n"


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        (
            KIND.replace("NAME", "others"),
            "the kind 'others' must begin with wrong_, so that it is unique",
        ),
        (
            KIND.replace("NAME", "wrong_a"),
            "the kind 'wrong_a' needs a specification of areal_wrong_a; return it in areal_add_hooks",
        ),
        (
            "@hookimpl\ndef areal_add_kinds():\n    return ['wrong_a']",
            "areal_add_kinds returned 'wrong_a', which is no Kind",
        ),
        ("@hookimpl\ndef areal_add_kinds():\n    raise OSError('oh')", "fails in areal_add_kinds: OSError: oh"),
        (
            "@hookimpl\ndef areal_add_hooks():\n    return []\n@hookimpl\ndef areal_wrong_a(): ...",
            "areal_wrong_a, which is not",
        ),
        (
            "@hookimpl\ndef areal_add_hooks():\n    import json\n    return json",
            "areal_add_hooks returned json, which has no function marked with @hookspec",
        ),
        (
            "from areal_core.plugins import hookspec\nclass Hooks:\n    @hookspec\n    def areal_other(self): ...\n"
            "@hookimpl\ndef areal_add_hooks():\n    return Hooks",
            "the hook areal_other must begin with areal_wrong_, so that it is unique",
        ),
    ],
)
def test_what_a_plugin_adds_is_checked(box, records, cause):
    box.plugin("wrong", records)
    outcome = box.areal("plugins", "wrong")
    assert outcome.code == 1
    assert "plugin 'wrong' (areal-wrong 1.2.3)" in outcome.out
    assert cause in outcome.out


def test_a_core_hook_cannot_be_added_again(box):
    box.plugin(
        "run",
        "from areal_core.plugins import hookspec\nclass Hooks:\n    @hookspec\n    def areal_run_finished(self): ...\n"
        "@hookimpl\ndef areal_add_hooks():\n    return Hooks",
    )
    assert "plugin 'run' (areal-run 1.2.3) adds a hook that cannot be added" in box.areal("plugins", "run").out
