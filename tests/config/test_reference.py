"""docs/config.md is what the models say, and has the settings of plugins where it is asked for them."""

from __future__ import annotations

from pathlib import Path

from areal_core.config.reference import reference
from areal_core.plugins import PluginManager

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_documentation_is_current():
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == reference(PluginManager()), "write it anew: areal config schema --markdown > docs/config.md"


def test_every_key_of_every_component_of_the_core_is_described():
    for line in reference(PluginManager()).splitlines():
        assert not line.endswith("|  |"), line


def test_the_command_writes_the_page_with_the_components_of_plugins(kit):
    outcome = kit.areal("config", "schema", "--markdown", "--plugins", "kit")
    assert outcome.code == 0, outcome.err
    assert "### `kit/engine`\n\nA training engine: trains.\n\n" in outcome.out
    assert "| `learning_rate` | number above 0 | `1e-05` | the step size |" in outcome.out
    assert "| `path` | text or null | `null` |  |" in outcome.out
    refused = kit.areal("config", "check", "run.yaml", "--markdown")
    assert refused.code == 2
    assert "--markdown has a meaning only with areal config schema" in refused.err
