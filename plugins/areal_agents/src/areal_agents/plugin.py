"""What this plugin supplies: workflows of agents, and ways to bring an agent. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """How an episode of an agent is played."""
    return [
        Component(
            "agent",
            "an agent of yours plays the episode against an address that speaks as OpenAI and Anthropic do",
            target="areal_agents.workflow:AgentWorkflow",
            config="areal_agents.config:AgentSettings",
        )
    ]


@hookimpl
def areal_agents() -> list[Component]:
    """Ways to bring an agent, beside a function of your own."""
    return [
        Component(
            "command",
            "a program in any language, run for each episode",
            target="areal_agents.agents:CommandAgent",
            config="areal_agents.config:CommandSettings",
        ),
        Component(
            "service",
            "a service that is called for each episode",
            target="areal_agents.agents:ServiceAgent",
            config="areal_agents.config:ServiceSettings",
        ),
    ]
