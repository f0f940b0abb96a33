"""Components of this plugin: a launcher, and the command that runs on each machine. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl


@hookimpl
def areal_launchers() -> list[Component]:
    """The launcher `external`."""
    return [
        Component(
            "external",
            "machines on which torchrun, MPI, Kubernetes or a user starts `areal node`",
            target="areal_nodes.launcher:ExternalLauncher",
            config="areal_nodes.config:ExternalSettings",
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal node`."""
    return [Command("node", "join this machine to a run", target="areal_nodes.command:main")]
