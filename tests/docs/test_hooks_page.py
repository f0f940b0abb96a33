"""The plugins of docs/extend/hooks.md are installed and used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from tests.conftest import Box

PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "hooks.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (areal_\w+/\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
CONFIG = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
FEED = """
from pathlib import Path
from areal_core.plugins import PluginManager
events = PluginManager.load({plugins}).events
for step, reward in enumerate({rewards}, start=1):
    metrics = {{"reward/all_episodes": reward}}
    metrics |= events.add_metrics(Path("run"), step, metrics)
    if reason := events.should_stop(Path("run"), step, metrics):
        print(f"step {{step}}, decline {{metrics['reward_guard/decline']:.2f}}: {{reason}}")
        break
else:
    print("to the end")
print(*events.silenced)
"""


@pytest.fixture
def installed(kit: Box) -> Box:
    """The box with every plugin of the page."""
    for name in dict.fromkeys(path.partition("/")[0].removeprefix("areal_") for path in FILES):
        files = {path.partition("/")[2]: text for path, text in FILES.items() if path.startswith(f"areal_{name}/")}
        kit.plugin(name, files.pop("plugin.py"), module=f"areal_{name}", modules=files)
    return kit


@pytest.mark.parametrize(
    ("plugins", "rewards", "outcome"),
    [
        (["reward_guard"], [0.8] * 9, "to the end\n\n"),
        (
            ["reward_guard"],
            [0.8] * 6 + [0.0] * 9,
            "step 9, decline 0.48: the mean reward of 5 steps fell from 0.80 to 0.32 (plugin 'reward_guard')\n\n",
        ),
        (["reward_guard", "patience"], [0.8] * 6 + [0.0] * 9, "to the end\n\n"),
    ],
)
def test_the_guard_stops_a_run_whose_reward_collapses(
    installed: Box, plugins: list[str], rewards: list[float], outcome: str
) -> None:
    done = installed.python(FEED.format(plugins=plugins, rewards=rewards))
    assert (done.out, done.err) == (outcome, "")


def test_a_config_chooses_a_component_of_the_added_kind(installed: Box) -> None:
    assert yaml.safe_load(CONFIG).keys() == {"dataset"}
    chosen = CONFIG.strip().replace("dataset: ", "dataset=")
    assert installed.shown("config.dataset.build()[3]['prompt']", chosen) == "stage 3:"
    refused = installed.resolve(chosen.replace("steep/steep", "steep/step"))
    assert "supplies no schedule named 'step'" in refused
    assert "did you mean 'steep/steep'?" in refused


def test_the_suite_of_the_added_kind_makes_a_component(installed: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed.site)
    (text,) = re.findall(r"```python\n# tests/test_steep.py\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)
    suite = names["TestSteep"]()
    suite.test_no_stage_comes_back()
    suite.component = "areal_steep.plugin:reversed"
    with pytest.raises(AssertionError, match="has no 'reversed'"):
        suite.test_no_stage_comes_back()


def test_the_added_hook_is_called(installed: Box) -> None:
    code = "from pathlib import Path; from areal_core.plugins import PluginManager\n"
    code += "plugins = PluginManager.load(['steep'])\n"
    code += "for step in range(1, 21): plugins.events.step_finished(Path('run'), step, {})\nprint(plugins.names)\n"
    assert installed.python(code).out == "step 10: stage 1\nstep 20: stage 2\n['curriculum', 'steep']\n"
