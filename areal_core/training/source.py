"""Where the trainer's batches come from, on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.messages.rollouts import Beginning


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked the run to stop
    """The run was asked to stop while it waited."""


class TrainingBatch(NamedTuple):
    """A batch as a rank has it.

    Attributes:
        batch: its sequences; None for a batch without data.
        groups: number and digest of each of its prompt groups.
        metrics: of it, and of the rollouts since the one before.
    """

    batch: PackedBatch | None
    groups: list[tuple[int, str]]
    metrics: dict[str, float]


class BatchSource(Protocol):
    """What the loop asks for on rank 0: the rollout controller, or a data set as it is."""

    def where_to_begin(self) -> Beginning:
        """The step, the checkpoint and the weight version that every rank begins with."""

    def next_batch(self, step: int) -> bytes:
        """What every rank is told of the batch of `step`, and reads it from. Raises `Interrupted`."""

    def begin_evaluation(self) -> None:
        """Begin to evaluate the synced weights. Nothing is synced before `end_evaluation`; batches may be."""

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """The metrics of the evaluation that was begun, when it has ended; empty where the source can make none.

        Args:
            patience_s: how long it is waited for once the run has been asked to stop.

        Raises:
            Interrupted: it has not ended by then.
        """

    def commit(self, step: int, checkpoint: Path) -> None:
        """The checkpoint of `step` batches is complete: from now on a resume starts there."""

    def close(self) -> None:
        """No further batch is needed."""
