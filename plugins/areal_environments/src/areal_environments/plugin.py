"""What this plugin supplies: conversations with tools. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """How a conversation with tools is played."""
    return [
        Component(
            "tools",
            "the policy calls typed functions of Python until it answers",
            target="areal_environments.tools:ToolWorkflow",
            config="areal_environments.config:ToolSettings",
        )
    ]
