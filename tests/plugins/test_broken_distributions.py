"""Sixteen distributions that are broken, each in its own way: who is at fault is named, and the repair repairs."""

from __future__ import annotations

import pytest

from areal_core import __version__ as VERSION

pytestmark = pytest.mark.slow

REWARDS = """
@hookimpl
def areal_reward_functions():
    return [Component("plain", "worth one", target="{package}.parts:plain", config={config!r})]
"""
PARTS = "def plain(completion, scale=1.0): return scale\n"
SETTINGS = "from areal_core.config import Selection, Settings, component\nclass Plain(Settings):\n    {field}\n"
CONFIG = """
steps: 1
model: {path: tiny}
dataset: parts.py:Rows
workflow: parts.py:Rows
rewards: [broken/plain]
inference_engine: parts.py:Rows
train_engine: parts.py:Rows
algorithm: {type: policy_gradient, advantage: "parts.py:loss", policy_loss: "parts.py:loss"}
"""
MINE = "class Rows: ...\ndef loss(terms, *, width=1.0): ...\n"
WHOLE = REWARDS.format(package="broken_package", config=None)
WITH_SETTINGS = REWARDS.format(package="broken_package", config="broken_package.settings:Plain")


def settings(field: str) -> dict:
    return {"records": WITH_SETTINGS, "modules": {"parts.py": PARTS, "settings.py": SETTINGS.format(field=field)}}


BROKEN = {
    "made for a later core": (
        {"records": WHOLE, "requires": ("areal-core>=9",)},
        f"needs areal-core>=9 but {VERSION} is installed",
        "upgrade the core with: pip install --upgrade 'areal-core>=9'",
    ),
    "made for a former core": (
        {"records": WHOLE, "requires": ("areal-core<0.1",)},
        f"needs areal-core<0.1 but {VERSION} is installed",
        "upgrade it with: pip install --upgrade areal-broken",
    ),
    "without a range": (
        {"records": WHOLE, "requires": ("pydantic",)},
        "does not declare which versions of areal-core it works with",
        'add to the dependencies of areal-broken: "areal-core>=',
    ),
    "without its library": (
        {"records": "import a_library"},
        "module 'a_library' is missing",
        "repair it with: pip install --upgrade areal-broken",
    ),
    "without its extra": (
        {
            "records": "import a_library",
            "requires": ("areal-core>=0.1", "a-library; extra == 'more'"),
            "metadata": "Provides-Extra: more",
        },
        "module 'a_library' is missing",
        "repair it with: pip install 'areal-broken[more]'",
    ),
    "raises": (
        {"records": "raise OSError('no such device')", "metadata": "Project-URL: Issues, https://example.org/issues"},
        "importing broken_package.plugin raises OSError: no such device",
        "report it to https://example.org/issues",
    ),
    "ends the program": ({"records": "raise SystemExit(3)"}, "raises SystemExit: 3", "report it to the authors"),
    "is no Python": ({"records": "def ("}, "raises SyntaxError", "report it to the authors of areal-broken"),
    "an entry point that leads nowhere": (
        {"records": WHOLE, "entry_point": "broken_package.plugins"},
        "No module named 'broken_package.plugins'",
        "report it to the authors of areal-broken",
    ),
    "a misspelt hook": (
        {"records": WHOLE.replace("areal_reward_functions", "areal_reward_function")},
        "implements areal_reward_function, which is not a hook",
        "did you mean areal_reward_functions?",
    ),
    "a hook without its mark": (
        {"records": WHOLE.replace("@hookimpl", "")},
        "'areal_reward_functions' is named like a hook but is not marked as one",
        "write @hookimpl above it",
    ),
    "records of another kind": (
        {"records": "@hookimpl\ndef areal_reward_functions():\n    return [Preset('a', 'b', path='c:d.yaml')]"},
        "areal_reward_functions is invalid",
        "returned Preset, not Component",
    ),
    "settings that are none": (
        {"records": WITH_SETTINGS, "modules": {"parts.py": PARTS, "settings.py": "class Plain: ..."}},
        "names broken_package.settings:Plain, which is no Settings model",
        "derive it from areal_core.config.Settings",
    ),
    "a default out of bounds": (
        settings("scale: float = 'much'"),
        "run.yaml:6: rewards.0.scale: must be a number",
        "not 'much'",
    ),
    "a default that nobody supplies": (
        settings('parts: list[Selection] = component("advantages", default=["none", "such"])'),
        "rewards.0.parts.1.type: the loaded plugins supply no",
        "named 'such'",
    ),
    "a default that is not there": (settings("scale: float"), "rewards.0.scale: is required", "run.yaml:6"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_and_its_repair(box, name):
    options, fault, repair = BROKEN[name]
    box.plugin("broken", **{"modules": {"parts.py": PARTS}, **options})
    box.file("parts.py", MINE)
    box.file("run.yaml", CONFIG)
    # An override of something else must not be blamed for it.
    for words in ([], ["rewards.0.weight=2"]):
        outcome = box.areal("config", "check", "run.yaml", *words)
        assert outcome.code == 1
        assert fault in outcome.err
        assert repair in outcome.err
        assert "command line" not in outcome.err
        assert "Traceback" not in outcome.err


def test_only_settings_are_proposed_as_keys(box):
    box.file("parts.py", MINE)
    box.file("run.yaml", CONFIG.replace('policy_loss: "parts.py:loss"', 'policy_loss: {type: "parts.py:loss", zzz: 2}'))
    message = box.areal("config", "check", "run.yaml", "rewards=[]").err
    assert "algorithm.policy_loss.zzz: unknown key\n" in message
    assert "keys here: width\n" in message
