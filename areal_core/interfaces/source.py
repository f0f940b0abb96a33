"""Where the trainer's batches come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.inference import BroadcastGroup, TensorDescription


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

    def release_engines(self) -> None:
        """The inference engines give their memory to the trainer until the next publication."""
        ...

    def probe(self) -> PackedBatch | None:
        """Answers to a few fixed requests from every copy of the published weights; None where nobody generates."""
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


class BroadcastTarget(Protocol):
    """The inference engines as the receivers of a broadcast; on rank 0."""

    needs_folder: bool
    """Whether some engine missed the last broadcast and waits for the same weights in a folder."""

    def form_group(self, address: str, port: int, backend: str, standing: str) -> BroadcastGroup | None:
        """See `areal_core.interfaces.BroadcastReceiver.form_group`."""
        ...

    def begin_broadcast(self, version: int, trained: int, tensors: Sequence[TensorDescription]) -> None:
        """The engines stop and receive; returns at once, so that the trainer can send."""
        ...

    def broadcast_failed(self) -> bool:
        """Whether the engines have given up already; asked while the trainer sends."""
        ...

    def end_broadcast(self) -> None:
        """Everything was sent; returns when the engines generate with it.

        Raises:
            RunError: none of them does.
        """
        ...

    def drop_broadcast(self) -> None:
        """The broadcast has failed, and its outcome is of no interest any more."""
        ...

    def offer_folder(self, version: int, folder: Path) -> None:
        """The weights of the last broadcast are complete in `folder`."""
        ...

    def publish(self, version: int, trained: int, folder: Path) -> None:
        """See `BatchSource.publish`."""
        ...
