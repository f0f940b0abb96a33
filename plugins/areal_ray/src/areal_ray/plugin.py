"""Components of this plugin: a launcher, and the command that submits a run as a job. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl


@hookimpl
def areal_launchers() -> list[Component]:
    """The launcher `ray`."""
    summary = "processes on a Ray cluster, or on a Ray of this machine alone that the run starts"
    return [Component("ray", summary, target="areal_ray.launcher:RayLauncher", config="areal_ray.config:RaySettings")]


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal ray submit`."""
    return [Command("submit", "run `areal run` as a job of a Ray cluster", target="areal_ray.command:main")]
