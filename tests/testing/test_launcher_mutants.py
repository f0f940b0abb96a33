"""The suite of launchers passes a correct one (test_launchers.py) and catches each of these broken ones."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.testing.conformance import LauncherSuite
from areal_core.testing.conformance import launchers as suite_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow


class Nameless(LocalLauncher):
    def _own(self, number: int, name: str) -> dict[str, str]:
        return {}


class Miscounts(LocalLauncher):
    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        return super().bring(command, environment) - 1


class KeepsVariables(LocalLauncher):
    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        known = {name: value for name, value in environment.items() if name.startswith("AREAL_")}
        return super().bring(command, known)


class SplitsWords(LocalLauncher):
    """As a shell does with what nobody has quoted."""

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        return super().bring(command, {name: value.split()[0] for name, value in environment.items()})


class SeesNothing(LocalLauncher):
    def lost(self) -> Mapping[str, str]:
        return {}


class SeesNoReason(LocalLauncher):
    def lost(self) -> Mapping[str, str]:
        return dict.fromkeys(super().lost(), "")


class NamesAnother(LocalLauncher):
    def lost(self) -> Mapping[str, str]:
        return {f"host-{name}": reason for name, reason in super().lost().items()}


class FearsForAll(LocalLauncher):
    def lost(self) -> Mapping[str, str]:
        return dict.fromkeys(self._wardens, "nobody knows")


class FearsForTheOthers(FearsForAll):
    def lost(self) -> Mapping[str, str]:
        return super().lost() if LocalLauncher.lost(self) else {}


class Hurries(LocalLauncher):
    def close(self) -> None:
        """Whoever waits for the supervisor's machine to forget them."""


class Insists(LocalLauncher):
    def close(self) -> None:
        super().close()
        for name in list(self._wardens):
            self._wardens.pop(name)
        self._wardens = None  # type: ignore[assignment]


class Once(LocalLauncher):
    has_brought = False

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        if Once.has_brought:
            raise RuntimeError("nodes are there already")
        Once.has_brought = True
        return super().bring(command, environment)


class Renames(LocalLauncher):
    count = 0

    def _own(self, number: int, name: str) -> dict[str, str]:
        Renames.count += 1
        return {**super()._own(number, name), "AREAL_NODE": f"node-{Renames.count}"}


def suite_of(launcher: type[LocalLauncher]) -> LauncherSuite:
    """The suite of a launcher with two nodes."""

    class Suite(LauncherSuite):
        patience_s = 5.0

        def make(self) -> Any:
            return launcher(LocalSettings(nodes=2))

    return Suite()


@pytest.mark.parametrize(
    ("launcher", "test", "words"),
    [
        (Nameless, "test_each_node_has_one_warden_and_a_name_of_its_own", "nodes have one name"),
        (Miscounts, "test_each_node_has_one_warden_and_a_name_of_its_own", "bring says that 1 nodes will come"),
        (FearsForAll, "test_each_node_has_one_warden_and_a_name_of_its_own", "no process can be started on any node"),
        (KeepsVariables, "test_a_warden_has_the_environment_that_is_given", "CONFORMANCE_WORDS is nothing"),
        (SplitsWords, "test_a_warden_has_the_environment_that_is_given", "CONFORMANCE_WORDS is two"),
        (SeesNothing, "test_a_node_whose_warden_is_killed_is_lost_by_name", "is not called lost"),
        (SeesNoReason, "test_a_node_whose_warden_is_killed_is_lost_by_name", "was killed, and lost are"),
        (NamesAnother, "test_a_node_whose_warden_is_killed_is_lost_by_name", "was killed, and lost are"),
        (
            FearsForTheOthers,
            "test_a_node_whose_warden_is_killed_is_lost_by_name",
            "one warden was killed, and lost are",
        ),
        (Hurries, "test_a_node_that_does_not_listen_any_more_is_ended", "stopped nodes go on"),
        (Insists, "test_the_end_is_confirmed_when_close_returns", "'NoneType' object has no attribute"),
        (Once, "test_nodes_are_brought_a_second_time", "nodes are there already"),
        (Renames, "test_nodes_are_brought_a_second_time", "nodes have other names the second time"),
        (SeesNothing, "test_a_node_that_cannot_be_brought_is_told", "wardens that end are not called lost"),
        (SeesNoReason, "test_a_node_that_cannot_be_brought_is_told", "no reason is told"),
    ],
)
def test_a_broken_launcher_is_caught(
    tmp_path: Path, launcher: type[LocalLauncher], test: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wardens: list[subprocess.Popen[bytes]] = []
    made = subprocess.Popen

    def remember(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        wardens.append(made(*arguments, **more))
        return wardens[-1]

    monkeypatch.setattr("areal_core.launchers.local.subprocess.Popen", remember)
    try:
        with pytest.raises((AssertionError, RunError, RuntimeError, AttributeError), match=words):
            getattr(suite_of(launcher), test)(tmp_path)
    finally:
        for warden in wardens:
            warden.kill()
            warden.wait()


def test_every_test_of_the_suite_catches_something() -> None:
    (mark,) = [mark for mark in test_a_broken_launcher_is_caught.pytestmark if mark.name == "parametrize"]
    tests = {name for name in dir(suite_module.LauncherSuite) if name.startswith("test_")}
    assert tests == {test for _, test, _ in mark.args[1]}
