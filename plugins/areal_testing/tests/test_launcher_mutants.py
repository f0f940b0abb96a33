"""Test the suite of launchers with broken launchers; each fails a test. test_launchers.py has the correct one."""

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


class SameNames(LocalLauncher):
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


class NeverRegisters(LocalLauncher):
    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        return await super().start(replace(group, command=["sleep", "600"]), places, environment)


class LeavesOrphans(LocalLauncher):
    """Its members run in a service that starts processes in other sessions."""

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Any:
        command = ["sh", "-c", '(setsid sleep 600 &) ; exec "$@"', "sh", *group.command]
        return await super().start(replace(group, command=command), places, environment)


def suite_of(launcher: type[LocalLauncher]) -> LauncherSuite:
    """Return the suite of a launcher."""

    class Suite(LauncherSuite):
        patience_s = 15.0

        def make(self) -> Any:
            return launcher(LocalSettings())

    return Suite()


@pytest.mark.parametrize(
    ("launcher", "test", "message"),
    [
        (SameNames, "test_nodes_have_unique_names", "must have 1 nodes"),
        (Renames, "test_nodes_have_unique_names", "nodes have other names"),
        (MovesMembers, "test_members_start_where_they_were_placed_with_their_variables", "was placed on"),
        (StartsOne, "test_members_start_where_they_were_placed_with_their_variables", "gang-1 has not started"),
        (StartsOne, "test_a_killed_member_is_reported_and_leaves_nothing", "gang-1 has not started"),
        (StartsOnce, "test_a_restartable_member_is_started_again", "goes has not started"),
        (NeverRegisters, "test_a_command_that_cannot_start_is_reported", ""),
        (LeavesOrphans, "test_nothing_is_left_when_close_returns", "still exist"),
        (LeavesOrphans, "test_groups_end_without_the_driver", "still exist"),
    ],
)
@pytest.mark.nightly
def test_a_broken_launcher_is_caught(tmp_path: Path, launcher: type[LocalLauncher], test: str, message: str) -> None:
    try:
        with pytest.raises((AssertionError, RunError, TimeoutError), match=message):
            getattr(suite_of(launcher), test)(tmp_path)
    finally:
        for path in tmp_path.glob("run/attempts/*/token"):
            for pid in processes_with("AREAL_TOKEN", path.read_text()):
                kill_tree(pid)


def test_every_test_of_the_suite_has_a_mutant() -> None:
    (mark,) = [mark for mark in test_a_broken_launcher_is_caught.pytestmark if mark.name == "parametrize"]
    tests = {name for name in dir(suite_module.LauncherSuite) if name.startswith("test_")}
    assert tests == {test for _, test, _ in mark.args[1]}
