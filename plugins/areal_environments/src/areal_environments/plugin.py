"""What this plugin supplies: conversations with tools, environments of libraries. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """How a conversation with tools is played."""
    return [
        Component(
            "tools",
            "the policy calls typed functions of Python, or tools of MCP servers, until it answers",
            target="areal_environments.tools:ToolWorkflow",
            config="areal_environments.config:ToolSettings",
        )
    ]


@hookimpl
def areal_environments() -> list[Component]:
    """Worlds of libraries that `core/multi_turn` plays with."""
    return [
        Component(
            "gymnasium",
            "a game of gymnasium, told in words",
            target="areal_environments.gymnasium_games:GymnasiumEnvironment",
            config="areal_environments.config:GymnasiumSettings",
        ),
        Component(
            "textarena",
            "a game of TextArena for one player",
            target="areal_environments.textarena_games:TextArenaEnvironment",
            config="areal_environments.config:TextArenaSettings",
        ),
        Component(
            "openenv",
            "an environment behind a server of OpenEnv",
            target="areal_environments.openenv_sessions:OpenEnvEnvironment",
            config="areal_environments.config:OpenEnvSettings",
        ),
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Rows for games that need no other data."""
    return [
        Component(
            "seeds",
            "rows that are nothing but seeds, one for each game",
            target="areal_environments.seeds:Seeds",
            config="areal_environments.config:SeedsSettings",
        )
    ]
