"""Where the trainer's batches come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data.batch import PackedBatch


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked the run to stop
    """The run was asked to stop while it waited."""


class BatchSource(Protocol):
    """What the loop asks for on rank 0."""

    def first_version(self, step: int) -> int:
        """The weight version under which a run that starts at `step` publishes first.

        0 where nothing needs to be published: engines that load the model have the same weights already.
        """
        ...

    def begin(self, version: int, step: int, folder: Path | None) -> None:
        """Generation may begin, with the weights in `folder` where a first version is published."""
        ...

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """The batch of `step` and its metrics; None for a batch without data. Raises `Interrupted`."""
        ...

    def publish(self, version: int, trained: int, folder: Path) -> None:
        """Weights of `version`, from `trained` batches, are complete in `folder`."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Evaluate the published weights; empty where the source cannot."""
        ...

    def commit(self, step: int, checkpoint: str) -> None:
        """The named checkpoint of `step` batches is complete: from now on a resume starts there."""
        ...

    def close(self) -> None:
        """No further batch is needed."""
        ...
