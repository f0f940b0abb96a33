"""What this plugin supplies. Imports nothing heavy: areal imports this module to see what there is.

Functions and classes marked with `register` are supplied because they are imported here. Modules that import torch are
not: a record says where their functions are, and areal imports them when a run needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, Component, HealthCheck, Preset, hookimpl

from areal_example.agents import solver
from areal_example.datasets import Doublings
from areal_example.environments import SecondChances
from areal_example.group_filters import not_solved
from areal_example.inference_engines import ToyAdapter
from areal_example.launchers import VerboseLauncher
from areal_example.models import LocalCopy
from areal_example.reward_shaping import ranked
from areal_example.rewards import brevity
from areal_example.sandboxes import TimedProcess
from areal_example.tools import product
from areal_example.trackers import MetricLines
from areal_example.workflows import SelfCheck

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Doublings",
    "LocalCopy",
    "MetricLines",
    "SecondChances",
    "SelfCheck",
    "TimedProcess",
    "ToyAdapter",
    "VerboseLauncher",
    "brevity",
    "not_solved",
    "product",
    "ranked",
    "solver",
]


@hookimpl
def areal_advantages() -> list[Component]:
    """Chosen by `algorithm: {advantage: example/better_or_worse}`."""
    return [
        Component(
            "better_or_worse",
            "1 if the reward is above the mean of the group, -1 if it is below",
            target="areal_example.advantages:better_or_worse",
            config="areal_example.config:BetterOrWorseSettings",
        )
    ]


@hookimpl
def areal_policy_losses() -> list[Component]:
    """Chosen by `algorithm: {policy_loss: example/capped_reinforce}`."""
    return [
        Component(
            "capped_reinforce",
            "REINFORCE, weighted by the capped ratio to the proximal policy",
            target="areal_example.policy_losses:capped_reinforce",
        )
    ]


@hookimpl
def areal_algorithms() -> list[Component]:
    """Chosen by `algorithm: example/better`; the core's composition does the work."""
    return [
        Component(
            "better",
            "the advantage and the loss of this plugin combined",
            target="areal_core.sdk:PolicyGradient",
            config="areal_example.config:BetterSettings",
        )
    ]


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """Chosen by `algorithm: {batch_transforms: [example/surprise_penalty]}`."""
    return [
        Component(
            "surprise_penalty",
            "charges each token its surprise: token_rewards",
            target="areal_example.batch_transforms:surprise_penalty",
        )
    ]


@hookimpl
def areal_corrections() -> list[Component]:
    """Chosen by `algorithm: {corrections: [example/near_only]}`."""
    return [
        Component(
            "near_only",
            "leaves out tokens that are far more likely now than when they were sampled",
            target="areal_example.corrections:near_only",
        )
    ]


@hookimpl
def areal_regularizers() -> list[Component]:
    """Chosen by `algorithm: {regularizers: [example/stay_close]}`."""
    return [
        Component(
            "stay_close",
            "keeps log-probabilities near those of the policy that sampled",
            target="areal_example.regularizers:stay_close",
        )
    ]


@hookimpl
def areal_auxiliary_losses() -> list[Component]:
    """Chosen by `algorithm: {auxiliary_losses: [example/reward_regression]}`."""
    return [
        Component(
            "reward_regression",
            "teaches a critic the reward of an answer",
            target="areal_example.auxiliary_losses:reward_regression",
            config="areal_example.config:RewardRegressionSettings",
        )
    ]


@hookimpl
def areal_loss_aggregations() -> list[Component]:
    """Chosen by `algorithm: {loss_aggregation: example/square_root_length}`."""
    return [
        Component(
            "square_root_length",
            "weighs an answer by the square root of its length",
            target="areal_example.loss_aggregations:square_root_length",
        )
    ]


@hookimpl
def areal_example_tokenizers() -> list[Component]:
    """Chosen by `algorithm: {example_tokenizer: example/completion_only}`."""
    return [
        Component(
            "completion_only",
            "learns the answer of a row as plain text",
            target="areal_example.example_tokenizers:completion_only",
        )
    ]


@hookimpl
def areal_train_engines() -> list[Component]:
    """Chosen by `train_engine: example/token_counting`."""
    return [
        Component(
            "token_counting",
            "FSDP that counts the tokens of each update",
            target="areal_example.train_engines:TokenCounting",
            config="areal_fsdp.config:FSDPConfig",
        )
    ]


@hookimpl
def areal_weight_transports() -> list[Component]:
    """Chosen by `weight_sync: {transport: example/timed_broadcast}`."""
    return [
        Component(
            "timed_broadcast",
            "a broadcast that logs how long it takes",
            target="areal_example.weight_transports:TimedBroadcast",
        )
    ]


@hookimpl
def areal_presets() -> list[Preset]:
    """Chosen by `areal run example/small_run`; it is the default."""
    return [
        Preset(
            "small_run",
            "sums with a tiny model",
            path="areal_example:small_run.yaml",
            plugins=("grpo", "hf", "fsdp"),
            default=True,
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """Called by `areal example count_steps RUN`."""
    return [
        Command(
            "count_steps",
            "counts the steps of a run",
            target="areal_example.commands:count_steps",
        )
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Called by `areal doctor`."""
    return [
        HealthCheck(
            "c_compiler",
            "a C compiler is installed",
            target="areal_example.health_checks:c_compiler",
        )
    ]


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Leave a note for whatever waits for the run."""
    (run_dir / "outcome.txt").write_text(f"{outcome}\n")
