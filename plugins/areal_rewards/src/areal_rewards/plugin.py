"""What this plugin supplies: rewards that can be verified, and data sets. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl


@hookimpl
def areal_reward_functions() -> list[Component]:
    """What an answer is worth."""
    return [
        Component(
            "exact_match",
            "1 if the completion is the row's answer",
            target="areal_rewards.text:exact_match",
            config="areal_rewards.config:ExactMatchSettings",
        ),
        Component(
            "math_verify",
            "1 if the completion is mathematically equal to the row's answer",
            target="areal_rewards.mathematics:math_verify",
            config="areal_rewards.config:MathVerifySettings",
        ),
        Component(
            "format",
            "1 if the completion has the form of a regular expression",
            target="areal_rewards.text:matches_format",
            config="areal_rewards.config:FormatSettings",
        ),
        Component(
            "length_penalty",
            "0 up to a length, then falling to -1 (DAPO's soft punishment of overlong answers)",
            target="areal_rewards.text:length_penalty",
            config="areal_rewards.config:LengthPenaltySettings",
        ),
        Component(
            "reasoning_gym",
            "scores a row of the data set reasoning_gym by its task's own scorer",
            target="areal_rewards.procedural:score_task",
            config="areal_rewards.config:TaskScoreSettings",
        ),
        Component(
            "judge",
            "the verdict of a language model behind an OpenAI-compatible address",
            target="areal_rewards.judge:Judge",
            config="areal_rewards.config:JudgeSettings",
        ),
        Component(
            "reward_model",
            "the score of a trained reward model, loaded in the reward process",
            target="areal_rewards.reward_models:RewardModel",
            config="areal_rewards.config:RewardModelSettings",
        ),
        Component(
            "remote_reward_model",
            "the score of a trained reward model behind an address",
            target="areal_rewards.reward_models:RemoteRewardModel",
            config="areal_rewards.config:RemoteRewardModelSettings",
        ),
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """Serving a reward model."""
    return [
        Command("serve_model", "serve a reward model for runs to ask", target="areal_rewards.model_server:main"),
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Where prompts and answers come from."""
    return [
        Component(
            "hub",
            "a data set of the Hugging Face hub",
            target="areal_rewards.tables:HubDataset",
            config="areal_rewards.config:HubSettings",
        ),
        Component(
            "files",
            "local files: json, jsonl, parquet, csv",
            target="areal_rewards.tables:FilesDataset",
            config="areal_rewards.config:FilesSettings",
        ),
        Component(
            "jsonl",
            "local jsonl files, read without any library",
            target="areal_rewards.tables:JSONLinesDataset",
            config="areal_rewards.config:JSONLinesSettings",
        ),
        Component(
            "reasoning_gym",
            "problems that the library reasoning-gym makes up",
            target="areal_rewards.procedural:ReasoningGymDataset",
            config="areal_rewards.config:ReasoningGymSettings",
        ),
    ]
