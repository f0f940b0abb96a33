"""`select`: a component that a script chooses, with the errors of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from areal_core.config import select
from areal_core.errors import ConfigError, PluginMissingError
from areal_core.plugins import Kind

if TYPE_CHECKING:
    from pathlib import Path

NESTED = """
from areal_core.config import Selection, Settings, component

class Method:
    class Config(Settings):
        advantage: Selection = component("advantages", default="not_there/mean")

    def __init__(self, settings):
        self.settings = settings
"""


def test_one_problem_has_its_hints_and_several_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        select("launchers", {"type": "local", "fork_serve": True})
    assert caught.value.message.endswith(": fork_serve: unknown key")
    assert caught.value.hints[0] == "did you mean 'fork_server'?"
    with pytest.raises(ConfigError) as caught:
        select("launchers", {"type": "local", "fork_serve": True, "threads_per_process": 0})
    assert len(caught.value.problems) == 2
    assert "  did you mean 'fork_server'?" in caught.value.hints


def test_a_plugin_that_is_not_installed_is_named_also_below_a_component_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(PluginMissingError, match="'not_there' is not a plugin of areal: install its distribution"):
        select("advantages", "not_there/mean")
    (tmp_path / "method.py").write_text(NESTED)
    with pytest.raises(PluginMissingError, match="'not_there' is not a plugin of areal: install its distribution"):
        select("algorithms", f"{tmp_path}/method.py:Method")


def test_a_kind_is_one_of_the_core_or_is_given_itself() -> None:
    with pytest.raises(ValueError, match="no kind of component is called 'curriculum_schedules'"):
        select("curriculum_schedules", "curriculum/linear")
    with pytest.raises(ConfigError, match="supply no schedule named 'linear'"):
        select(Kind("curriculum_schedules", "schedule"), "linear")
