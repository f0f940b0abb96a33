"""Trajectories, columns of numbers, and packed batches, ragged PyTorch tensors that are never padded.

A workflow makes a `Trajectory`; many trajectories become one `PackedBatch`, in which the values of all sequences
stand one behind another, with their lengths beside them. Nothing in this package knows about models or servers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_core.data.tokens import SampledTokens, TokenIds
from areal_core.data.trajectory import Episode, FinishReason, Generation, Trajectory, TrajectoryBuilder

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch, Ragged
    from areal_core.data.groups import by_agent, group_mean, group_standard_deviation, group_sum
    from areal_core.data.metrics import Metric, combine, reduce_over_ranks
    from areal_core.data.prediction import shift_to_predictions
    from areal_core.data.split import split_by_tokens, split_into_microbatches

_IN_TORCH = {
    "batch": ("PackedBatch", "Ragged"),
    "groups": ("by_agent", "group_mean", "group_standard_deviation", "group_sum"),
    "metrics": ("Metric", "combine", "reduce_over_ranks"),
    "prediction": ("shift_to_predictions",),
    "split": ("split_by_tokens", "split_into_microbatches"),
}
"""By module. They are imported when somebody asks for them: a rollout worker needs none, and torch takes a second."""

__all__ = [
    "Episode",
    "FinishReason",
    "Generation",
    "Metric",
    "PackedBatch",
    "Ragged",
    "SampledTokens",
    "TokenIds",
    "Trajectory",
    "TrajectoryBuilder",
    "by_agent",
    "combine",
    "group_mean",
    "group_standard_deviation",
    "group_sum",
    "reduce_over_ranks",
    "shift_to_predictions",
    "split_by_tokens",
    "split_into_microbatches",
]


def __getattr__(name: str) -> Any:
    for module, names in _IN_TORCH.items():
        if name in names:
            return getattr(import_module(f"areal_core.data.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
