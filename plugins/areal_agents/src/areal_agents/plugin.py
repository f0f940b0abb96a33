"""What this plugin supplies: workflows of agents and of tools, ways to bring an agent, environments of libraries."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """How an episode of an agent, or a conversation with tools, is played."""
    return [
        Component(
            "agent",
            "an agent of yours that uses the policy through an OpenAI- and Anthropic-compatible endpoint",
            target="areal_agents.workflow:AgentWorkflow",
            config="areal_agents.config:AgentSettings",
        ),
        Component(
            "tools",
            "the policy calls Python functions or tools of MCP servers until it answers",
            target="areal_agents.environments.tools:ToolWorkflow",
            config="areal_agents.environments.config:ToolSettings",
        ),
    ]


@hookimpl
def areal_agents() -> list[Component]:
    """Ways to bring an agent, beside a function of your own."""
    return [
        Component(
            "command",
            "a program in any language, started for each episode",
            target="areal_agents.agents:CommandAgent",
            config="areal_agents.config:CommandSettings",
        ),
        Component(
            "service",
            "an HTTP service, called for each episode",
            target="areal_agents.agents:ServiceAgent",
            config="areal_agents.config:ServiceSettings",
        ),
    ]


@hookimpl
def areal_environments() -> list[Component]:
    """Worlds of libraries that `core/multi_turn` plays with."""
    return [
        Component(
            "gymnasium",
            "a game of gymnasium as text",
            target="areal_agents.environments.gymnasium_games:GymnasiumEnvironment",
            config="areal_agents.environments.config:GymnasiumSettings",
        ),
        Component(
            "textarena",
            "a single-player game of TextArena",
            target="areal_agents.environments.textarena_games:TextArenaEnvironment",
            config="areal_agents.environments.config:TextArenaSettings",
        ),
        Component(
            "openenv",
            "a session of an OpenEnv server",
            target="areal_agents.environments.openenv_sessions:OpenEnvEnvironment",
            config="areal_agents.environments.config:OpenEnvSettings",
        ),
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Rows for games that need no other data."""
    return [
        Component(
            "seeds",
            "rows that consist of a seed only, one for each game",
            target="areal_agents.environments.seeds:Seeds",
            config="areal_agents.environments.config:SeedsSettings",
        )
    ]
