"""Plugins: how everything outside of the core becomes part of a run. This text is also the tutorial.

A plugin is a distribution with one entry point in the group `areal.plugins`:

    [project]
    name = "areal-shortest"
    version = "0.1.0"
    dependencies = ["areal-core>=0.1,<0.2"]            # required: areal checks the range when it loads the plugin

    [project.entry-points."areal.plugins"]
    shortest = "areal_shortest.plugin"

The entry point names a module with registered functions and classes:

    from typing import Annotated
    from areal_core.plugins import register
    from pydantic import Field

    FreeTokens = Annotated[int, Field(ge=0, description="tokens that cost nothing")]

    @register("reward_functions")
    def brevity(completion_ids, *, free_tokens: FreeTokens = 20):
        '''Reward short answers.'''
        return min(1.0, free_tokens / max(1, len(completion_ids)))

Its settings are its parameters. The module imports nothing heavy: areal imports it whenever it loads the plugin. Hooks
in the module return records of components whose modules import torch. areal imports `target` only in the process that
uses it:

    @hookimpl
    def areal_policy_losses():
        return [Component("capped", "a bounded weight", target="areal_shortest.losses:capped")]

A record may name a model of the settings, derived from `areal_core.config.Settings`, as
`config="areal_shortest.config:CappedSettings"`. Then settings are checked where torch is not installed, and the model
may check them against the rest of the config.

After `pip install areal-shortest`, a config chooses the component with `type: shortest/brevity`, and `areal plugins
shortest` shows what the plugin supplies. Event hooks observe a run (`areal_step_finished`), add metrics to its steps
(`areal_add_metrics`) and stop it (`areal_should_stop`). A plugin may add kinds of components and hooks that other
plugins implement (`areal_add_kinds`, `areal_add_hooks`). `areal_core.plugins.hooks` has every hook with an example.
The interfaces that components implement are in `areal_core.sdk`, `.engines`, `.servers` and `.launchers`.
"""

from areal_core.plugins.catalog import extra_module, install_command
from areal_core.plugins.manager import PluginManager
from areal_core.plugins.markers import hookimpl, hookspec
from areal_core.plugins.records import Command, Component, Finding, HealthCheck, Kind, Preset, Record
from areal_core.plugins.registered import register

__all__ = [
    "Command",
    "Component",
    "Finding",
    "HealthCheck",
    "Kind",
    "PluginManager",
    "Preset",
    "Record",
    "extra_module",
    "hookimpl",
    "hookspec",
    "install_command",
    "register",
]
