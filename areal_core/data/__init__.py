"""Trajectories and packed batches: ragged PyTorch tensors, never padded.

A workflow makes a `Trajectory`; many trajectories become one `PackedBatch`, in which the values of all sequences
stand one behind another, with their lengths beside them. Nothing in this package knows about models or servers.
"""

from areal_core.data.batch import PackedBatch, Ragged
from areal_core.data.groups import by_player, group_mean, group_standard_deviation, group_sum
from areal_core.data.metrics import Metric, combine, reduce_over_ranks
from areal_core.data.prediction import shift_to_predictions
from areal_core.data.split import split_by_tokens, split_into_microbatches
from areal_core.data.trajectory import Episode, FinishReason, Generation, Trajectory, TrajectoryBuilder

__all__ = [
    "Episode",
    "FinishReason",
    "Generation",
    "Metric",
    "PackedBatch",
    "Ragged",
    "Trajectory",
    "TrajectoryBuilder",
    "by_player",
    "combine",
    "group_mean",
    "group_standard_deviation",
    "group_sum",
    "reduce_over_ranks",
    "shift_to_predictions",
    "split_by_tokens",
    "split_into_microbatches",
]
