"""Test the suite of plugins: a correct plugin passes, and each broken one fails a test."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from areal_testing.conformance import PluginSuite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

RECORDS = """
from areal_core.plugins import Component, hookimpl

@hookimpl
def areal_reward_functions():
    return [Component("short", "rewards brevity", target="{package}.parts:short", config="{package}.settings:Short"),
            Component("plain", "takes no settings", target="{package}.parts:plain")]
"""
SETTINGS = """
from pydantic import Field
from areal_core.config import Settings

class Short(Settings):
    limit: int = Field(3, description="characters that cost nothing")
"""
PARTS = """
def short(completion, *, limit): return float(len(completion) <= limit)
def plain(completion): return 1.0
"""
numbers = itertools.count()


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginSuite]:
    """Return a function that installs a plugin, with some text replaced, and makes its suite."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(text: str = "", other: str = "") -> PluginSuite:
        package = f"mutant{next(numbers)}"
        (tmp_path / package).mkdir()
        for name, module in (("__init__", ""), ("plugin", RECORDS), ("settings", SETTINGS), ("parts", PARTS)):
            assert not text or text in RECORDS + SETTINGS + PARTS
            (tmp_path / package / f"{name}.py").write_text(module.replace(text, other).replace("{package}", package))
        folder = tmp_path / f"areal_{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: areal-{package}\nVersion: 1\nRequires-Dist: areal-core<0.2,>=0.1\n"
        )
        (folder / "entry_points.txt").write_text(f"[areal.plugins]\n{package} = {package}.plugin\n")
        return type("Suite", (PluginSuite,), {"plugin": package})()

    return make


def test_a_correct_plugin_passes(suite: Callable[..., PluginSuite]) -> None:
    for test in methods_of(suite()):
        test()


def test_a_default_may_be_repeated_in_the_signature(suite: Callable[..., PluginSuite]) -> None:
    for test in methods_of(suite("*, limit)", "*, limit=3)")):
        test()


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ("parts:plain", "parts:nothing", "nothing"),
        ("settings:Short", "settings:Nothing", "Nothing"),
        ("settings:Short", "settings:Field", "config leads to <function Field"),
        ("Short(Settings)", "Short", "Short is not derived from Settings"),
        (', description="characters that cost nothing"', "", "settings without a description: limit"),
        ("*, limit)", "*, bound)", "takes the keywords ['bound'], its settings have ['limit']"),
        ("*, limit)", "*, limit=4)", "limit is 4 by default in the function and 3 in the settings"),
        ("plain(completion)", "plain(completion, scale=2)", "settings without a description: scale"),
        (
            "def plain(completion)",
            "class plain:\n    Config = dict\n    def __init__(self)",
            "parts:plain.Config as config",
        ),
        ("from pydantic import Field", "import torch\nfrom pydantic import Field", "imports torch"),
        ("Component, hookimpl\n", "Component, hookimpl\nimport torch\n", "imports torch"),
        ("    return [", "    return []\n    return [", "has no records"),
    ],
)
def test_a_broken_plugin_is_caught(text: str, other: str, message: str, suite: Callable[..., PluginSuite]) -> None:
    broken, messages = suite(text, other), []
    for test in methods_of(broken):
        try:
            test()
        except Exception as error:  # noqa: BLE001  # assertions and errors of the plugin system
            messages.append(str(error))
    assert any(message in line for line in messages), messages


def methods_of(suite: PluginSuite) -> list[Callable[[], None]]:
    return [getattr(suite, name) for name in dir(PluginSuite) if name.startswith("test_")]
