"""Where the trainer's batches come from, on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.messages.rollouts import Beginning


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked the run to stop
    """The run was asked to stop while it waited."""


class BatchSource(Protocol):
    """What the loop asks for on rank 0: the rollout controller, or a data set as it is."""

    def where_to_begin(self) -> Beginning:
        """The step, the checkpoint and the weight version that every rank begins with."""

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """The batch of `step` and its metrics; None for a batch without data. Raises `Interrupted`."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate the published weights; empty where the source cannot. Raises `Interrupted`."""

    def commit(self, step: int, checkpoint: Path) -> None:
        """The checkpoint of `step` batches is complete: from now on a resume starts there."""

    def close(self) -> None:
        """No further batch is needed."""
