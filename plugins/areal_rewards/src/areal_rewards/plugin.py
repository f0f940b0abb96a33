"""Components of this plugin: rewards, data sets, and a command that serves a reward model. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl
from areal_rewards.judge import Judge
from areal_rewards.mathematics import math_verify
from areal_rewards.procedural import ReasoningGymDataset, score_task
from areal_rewards.tables import FilesDataset, HubDataset, JSONLinesDataset
from areal_rewards.text import exact_match, length_penalty, matches_format

__all__ = [
    "FilesDataset",
    "HubDataset",
    "JSONLinesDataset",
    "Judge",
    "ReasoningGymDataset",
    "exact_match",
    "length_penalty",
    "matches_format",
    "math_verify",
    "score_task",
]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Reward models. They are registered here, because their module imports transformers when it is used."""
    return [
        Component(
            "reward_model",
            "score of a trained reward model, loaded in the reward process",
            target="areal_rewards.reward_models:RewardModel",
            config="areal_rewards.config:RewardModelSettings",
        ),
        Component(
            "remote_reward_model",
            "score of a trained reward model that `areal serve_model` serves",
            target="areal_rewards.reward_models:RemoteRewardModel",
            config="areal_rewards.config:RemoteRewardModelSettings",
        ),
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """The command that serves a reward model."""
    return [
        Command("serve_model", "serve a reward model over HTTP", target="areal_rewards.model_server:main"),
    ]
