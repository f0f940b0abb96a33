"""The records of the plugin lead to what exists."""

from __future__ import annotations

from areal_testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "nodes"
