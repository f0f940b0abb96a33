"""Components of this plugin: workflows with agents and tools, kinds of agents, environments, and a data set."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """Workflows that run an agent, or a conversation with tools."""
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
        Component(
            "verifiers",
            "an environment of verifiers, served by an interpreter of its own",
            target="areal_agents.verifiers.workflow:VerifiersWorkflow",
            config="areal_agents.verifiers.config:VerifiersSettings",
        ),
        Component(
            "nemo_gym",
            "a resources server of NeMo Gym, in an interpreter of its own",
            target="areal_agents.nemo_gym.workflow:NemoGymWorkflow",
            config="areal_agents.nemo_gym.config:NemoGymSettings",
        ),
        Component(
            "openenv",
            "an environment of OpenEnv, in an interpreter of its own or at an address",
            target="areal_agents.openenv.workflow:OpenEnvWorkflow",
            config="areal_agents.openenv.config:OpenEnvSettings",
        ),
        Component(
            "harbor",
            "a task of Harbor without a container image: the policy works in a sandbox, and the task's tests reward it",
            target="areal_agents.harbor.workflow:HarborWorkflow",
            config="areal_agents.harbor.config:HarborSettings",
        ),
    ]


@hookimpl
def areal_agents() -> list[Component]:
    """Kinds of agents in addition to Python functions."""
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
    """Environments of other libraries, for `core/multi_turn`."""
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
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Data sets of environments."""
    return [
        Component(
            "seeds",
            "rows that consist of a seed only, one for each game",
            target="areal_agents.environments.seeds:Seeds",
            config="areal_agents.environments.config:SeedsSettings",
        ),
        Component(
            "verifiers",
            "the tasks of a taskset of verifiers",
            target="areal_agents.verifiers.dataset:VerifiersDataset",
            config="areal_agents.verifiers.config:VerifiersDataSettings",
        ),
        Component(
            "nemo_gym",
            "rows for a resources server of NeMo Gym",
            target="areal_agents.nemo_gym.dataset:NemoGymDataset",
            config="areal_agents.nemo_gym.config:NemoGymDataSettings",
        ),
        Component(
            "openenv",
            "the tasks of an OpenEnv environment's split",
            target="areal_agents.openenv.dataset:OpenEnvDataset",
            config="areal_agents.openenv.config:OpenEnvDataSettings",
        ),
        Component(
            "harbor",
            "the tasks of Harbor in a folder",
            target="areal_agents.harbor.tasks:HarborTasks",
            config="areal_agents.harbor.config:HarborDataSettings",
        ),
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal environments`."""
    return [
        Command("environments", "list the environments that are installed", target="areal_agents.listing:main"),
    ]
