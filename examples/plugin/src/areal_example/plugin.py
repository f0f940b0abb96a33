"""What this plugin supplies, as strings. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from pathlib import Path


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Chosen in a config by `type: example/brevity`."""
    return [
        Component(
            "brevity",
            "rewards short answers that end by themselves",
            target="areal_example.rewards:brevity",
            config="areal_example.config:BrevitySettings",
        )
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Chosen by `dataset: example/doublings`."""
    return [
        Component(
            "doublings",
            "sums of a number and itself",
            target="areal_example.datasets:Doublings",
            config="areal_example.config:DoublingsSettings",
        )
    ]


@hookimpl
def areal_workflows() -> list[Component]:
    """Chosen by `workflow: example/self_check`."""
    return [
        Component(
            "self_check",
            "an answer, a question whether it is right, and a second answer, which is scored",
            target="areal_example.workflows:SelfCheck",
            config="areal_example.config:SelfCheckSettings",
        )
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """Chosen by `algorithm: {advantage: example/better_or_worse}`."""
    return [
        Component(
            "better_or_worse",
            "1 above the mean of the prompt's answers, -1 below it",
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
            "REINFORCE, weighted by the ratio to the proximal policy up to a cap",
            target="areal_example.policy_losses:capped_reinforce",
            config="areal_example.config:CappedReinforceSettings",
        )
    ]


@hookimpl
def areal_algorithms() -> list[Component]:
    """Chosen by `algorithm: example/better`; the core's composition does the work."""
    return [
        Component(
            "better",
            "the advantage and the loss of this plugin together",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_example.config:BetterSettings",
        )
    ]


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Leave a note for whatever waits for the run."""
    (run_dir / "outcome.txt").write_text(f"{outcome}\n")
