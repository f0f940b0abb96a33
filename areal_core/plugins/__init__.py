"""Plugins: how anything that is not the core becomes part of a run. This page is also the tutorial.

A plugin is a distribution with one entry point in the group `areal.plugins`:

    [project]
    name = "areal-shortest"
    version = "0.1.0"
    dependencies = ["areal-core>=0.1,<0.2"]            # the range is required; it is checked when the plugin is loaded

    [project.entry-points."areal.plugins"]
    shortest = "areal_shortest.plugin"

The module that the entry point names holds functions that return records. It imports nothing heavy:

    from areal_core.plugins import Component, hookimpl

    @hookimpl
    def areal_reward_functions():
        return [Component("brevity", "rewards short answers",
                          target="areal_shortest.rewards:brevity",
                          config="areal_shortest.config:BrevitySettings")]

`target` is the function or class, imported only in the process that uses it. `config` is a model of the settings,
derived from `areal_core.config.Settings`; leave it out if there are none:

    from areal_core.config import Settings
    from pydantic import Field

    class BrevitySettings(Settings):
        free_tokens: int = Field(default=20, ge=0, description="tokens that cost nothing")

After `pip install areal-shortest`, a config chooses it by `type: shortest/brevity`, and `areal plugins shortest`
shows what it supplies. Functions named after an event (`areal_step_finished(run_dir, step, metrics)`, ...) are told
what happens in a run. `areal_core.plugins.hooks` lists every hook; what a component must do is in
`areal_core.interfaces`.
"""

from areal_core.plugins.catalog import extra_module, install_command
from areal_core.plugins.manager import PluginManager
from areal_core.plugins.markers import hookimpl
from areal_core.plugins.provenance import Provenance
from areal_core.plugins.records import KINDS, Command, Component, Finding, HealthCheck, Preset

__all__ = [
    "KINDS",
    "Command",
    "Component",
    "Finding",
    "HealthCheck",
    "PluginManager",
    "Preset",
    "Provenance",
    "extra_module",
    "hookimpl",
    "install_command",
]
