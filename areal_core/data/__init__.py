"""Trajectories, and batches of them without padding.

A workflow builds a `Trajectory`. Many trajectories form a `PackedBatch`, which has the concatenated values of all
sequences and their lengths. Nothing in this package depends on models or servers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_core.data.tables import ArrowRows
from areal_core.data.tokens import SampledTokens, TokenIds
from areal_core.data.trajectory import Episode, FinishReason, Generation, Trajectory, TrajectoryBuilder, Values

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
"""Names by the module that defines them. They are imported on first use, because they need torch: rollout workers use
none of them, and importing torch takes a second."""

__all__ = [
    "ArrowRows",
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
    "Values",
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
