"""The suite of launchers passes a correct one (test_launchers.py) and catches each of these broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node, Place, ProcessGroup
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.process_tree import kill_tree, processes_with
from areal_core.runtime.settings import LocalSettings
from areal_testing.conformance import LauncherSuite
from areal_testing.conformance import launchers as suite_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow


class Nameless(LocalLauncher):
    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        return [*await super().nodes(groups)] * 2


class Renames(LocalLauncher):
    count = 0

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        Renames.count += 1
        return [Node(f"node-{Renames.count}", self.host)]


class MovesMembers(LocalLauncher):
    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        return await super().start(group, {index: Place("elsewhere") for index in places}, environment)


class StartsOne(LocalLauncher):
    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        return await super().start(group, dict([*places.items()][:1]), environment)


class StartsOnce(LocalLauncher):
    started: set[str]

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        self.started = getattr(self, "started", set())
        if group.name in self.started:
            raise RunError("it was started before")
        self.started.add(group.name)
        return await super().start(group, places, environment)


class SaysNothing(LocalLauncher):
    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        return await super().start(replace(group, command=["sleep", "600"]), places, environment)


class ForgetsTheHub(LocalLauncher):
    """Its members lie in a service of their own, which starts them again."""

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        words = ["sh", "-c", '(setsid sleep 600 &) ; exec "$@"', "sh", *group.command]
        return await super().start(replace(group, command=words), places, environment)


def suite_of(launcher: type[LocalLauncher]) -> LauncherSuite:
    """The suite of a launcher."""

    class Suite(LauncherSuite):
        patience_s = 15.0

        def make(self) -> Any:
            return launcher(LocalSettings())

    return Suite()


@pytest.mark.parametrize(
    ("launcher", "test", "words"),
    [
        (Nameless, "test_nodes_have_names_of_their_own", "there are 1 nodes"),
        (Renames, "test_nodes_have_names_of_their_own", "nodes have other names"),
        (MovesMembers, "test_members_come_where_they_were_placed_with_what_they_are_told", "was placed on"),
        (StartsOne, "test_members_come_where_they_were_placed_with_what_they_are_told", "gang-1 has not come"),
        (StartsOne, "test_a_member_that_is_killed_is_noticed_and_leaves_nothing", "gang-1 has not come"),
        (StartsOnce, "test_a_member_that_may_be_replaced_is_started_again", "goes has not come"),
        (SaysNothing, "test_a_command_that_cannot_be_started_is_told", ""),
        (ForgetsTheHub, "test_nothing_is_left_when_close_returns", "still there"),
        (ForgetsTheHub, "test_groups_end_by_themselves_when_the_driver_is_gone", "still there"),
    ],
)
@pytest.mark.nightly
def test_a_broken_launcher_is_caught(tmp_path: Path, launcher: type[LocalLauncher], test: str, words: str) -> None:
    try:
        with pytest.raises((AssertionError, RunError, TimeoutError), match=words):
            getattr(suite_of(launcher), test)(tmp_path)
    finally:
        for path in tmp_path.glob("run/attempts/*/token"):
            for pid in processes_with("AREAL_TOKEN", path.read_text()):
                kill_tree(pid)


def test_every_test_of_the_suite_catches_something() -> None:
    (mark,) = [mark for mark in test_a_broken_launcher_is_caught.pytestmark if mark.name == "parametrize"]
    tests = {name for name in dir(suite_module.LauncherSuite) if name.startswith("test_")}
    assert tests == {test for _, test, _ in mark.args[1]}
