"""Plugins: how everything outside of the core becomes part of a run. This text is also the tutorial.

A plugin is a distribution with one entry point in the group `areal.plugins`:

    [project]
    name = "areal-shortest"
    version = "0.1.0"
    dependencies = ["areal-core>=0.1,<0.2"]            # required: areal checks the range when it loads the plugin

    [project.entry-points."areal.plugins"]
    shortest = "areal_shortest.plugin"

The entry point names a module whose functions return records. The module imports nothing heavy:

    from areal_core.plugins import Component, hookimpl

    @hookimpl
    def areal_reward_functions():
        return [Component("brevity", "rewards short answers",
                          target="areal_shortest.rewards:brevity",
                          config="areal_shortest.config:BrevitySettings")]

`target` is the function or class. areal imports it only in the process that uses it. `config` is a model of the
settings, derived from `areal_core.config.Settings`. Leave it out if there are none:

    from areal_core.config import Settings
    from pydantic import Field

    class BrevitySettings(Settings):
        free_tokens: int = Field(default=20, ge=0, description="tokens that cost nothing")

After `pip install areal-shortest`, a config chooses the component with `type: shortest/brevity`, and `areal plugins
shortest` shows what the plugin supplies. Event hooks observe a run (`areal_step_finished`), add metrics to its steps
(`areal_add_metrics`) and stop it (`areal_should_stop`). A plugin may add kinds of components and hooks that other
plugins implement (`areal_add_kinds`, `areal_add_hooks`). `areal_core.plugins.hooks` has every hook with an example.
The interfaces that components implement are in `areal_core.sdk`, `.engines`, `.servers` and `.launchers`.
"""

from areal_core.plugins.catalog import extra_module, install_command
from areal_core.plugins.manager import PluginManager
from areal_core.plugins.markers import hookimpl, hookspec
from areal_core.plugins.provenance import Provenance
from areal_core.plugins.records import KINDS, Command, Component, Finding, HealthCheck, Kind, Preset

__all__ = [
    "KINDS",
    "Command",
    "Component",
    "Finding",
    "HealthCheck",
    "Kind",
    "PluginManager",
    "Preset",
    "Provenance",
    "extra_module",
    "hookimpl",
    "hookspec",
    "install_command",
]
