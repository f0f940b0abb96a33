"""A component's function has no defaults, or those of its settings: a different one would be believed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from areal_core.plugins import PluginManager

ROOT = Path(__file__).parents[2]
DECLARED = {path.parent.name: path.read_text() for path in sorted((ROOT / "plugins").glob("areal_*/pyproject.toml"))}
PLUGINS = [name.removeprefix("areal_") for name, text in DECLARED.items() if "areal.plugins" in text]
"""The others are libraries alone."""


@pytest.mark.slow
def test_functions_leave_defaults_to_their_settings() -> None:
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    manager = PluginManager.load(PLUGINS)
    checked, wrong = 0, []
    for _, record in manager.records():
        if (settings := getattr(record, "config", None)) is None:
            continue
        target = manager.import_from(record, record.target)  # type: ignore[attr-defined]
        fields = manager.import_from(record, settings).model_fields  # type: ignore[attr-defined]
        if inspect.isfunction(target):
            checked += 1
            parameters = inspect.signature(target).parameters.values()
            wrong += [
                f"{record.reference}: {p}"
                for p in parameters
                if p.name in fields and p.default not in (p.empty, fields[p.name].default)
            ]
    assert checked > 5
    assert wrong == []
