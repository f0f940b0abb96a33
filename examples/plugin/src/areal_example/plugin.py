"""What this plugin supplies. Imports nothing heavy: areal imports this module to see what there is.

Functions and classes marked with `register` are supplied because they are imported here. Modules that import torch are
not: a record says where their functions are, and areal imports them when a run needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Component, hookimpl

from areal_example.datasets import Doublings
from areal_example.environments import SecondChances
from areal_example.group_filters import not_solved
from areal_example.reward_shaping import ranked
from areal_example.rewards import brevity
from areal_example.trackers import MetricLines
from areal_example.workflows import SelfCheck

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Doublings",
    "MetricLines",
    "SecondChances",
    "SelfCheck",
    "brevity",
    "not_solved",
    "ranked",
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
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_example.config:BetterSettings",
        )
    ]


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Leave a note for whatever waits for the run."""
    (run_dir / "outcome.txt").write_text(f"{outcome}\n")
