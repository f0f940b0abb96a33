"""Command of this plugin, and the config that it starts with. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, Component, Preset, hookimpl

_NO_SETTINGS = "areal_core.config:NoSettings"


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal tinker serve`."""
    return [Command("serve", "serve a model to clients of the Tinker API", target="areal_tinker.command:main")]


@hookimpl
def areal_algorithms() -> list[Component]:
    """The algorithm of a server: none, because clients bring their losses."""
    target = "areal_tinker.parts:ClientLosses"
    return [Component("client", "losses of Tinker clients", target=target, config=_NO_SETTINGS)]


@hookimpl
def areal_datasets() -> list[Component]:
    """The data set of a server: none, because clients bring their data."""
    target = "areal_tinker.parts:ClientData"
    return [Component("client", "data of Tinker clients", target=target, config=_NO_SETTINGS)]


@hookimpl
def areal_presets() -> list[Preset]:
    """The config of a server, to which a model is added."""
    return [
        Preset(
            "server",
            "serve a model to clients of the Tinker API",
            path="areal_tinker:presets/server.yaml",
            plugins=("fsdp",),
            default=True,
        )
    ]
