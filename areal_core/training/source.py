"""Where batches come from: asked on the main rank, and shared with all ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.runtime.rpc import FrameDecoder, PeerClosed, encode_frame
from areal_core.training.collectives import broadcast, broadcast_bytes, is_main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.messages.rollouts import ResumePoint


class Interrupted(Exception):  # noqa: N818 - not always an error
    """The run stops in order: the parameters are sound, and all ranks write a last checkpoint.

    Attributes:
        failure: why, on the rank that knows it; None if the run was asked to stop.
    """

    def __init__(self, failure: RunError | None = None) -> None:
        super().__init__()
        self.failure = failure


class TrainingBatch(NamedTuple):
    """A batch as a rank has it.

    Attributes:
        batch: its sequences; None for a batch without data.
        groups: number and digest of each of its prompt groups.
        metrics: of the batch, and of the rollouts since the batch before.
    """

    batch: PackedBatch | None
    groups: list[tuple[int, str]]
    metrics: dict[str, float]


class BatchSource(Protocol):
    """Makes batches, on the main rank: the connection to the rollout controller, or the rows of a data set."""

    def resume_point(self) -> ResumePoint:
        """Return the step, the checkpoint and the weight version that every rank begins with."""

    def next_batch(self, step: int) -> bytes:
        """Return what every rank reads the batch of `step` from. Raises `Interrupted`."""

    def begin_evaluation(self) -> None:
        """Begin to evaluate the synced weights. No weights are synced before `end_evaluation`; batches may be made."""

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """Wait for the evaluation and return its metrics; none if the source cannot evaluate.

        Args:
            patience_s: seconds to wait for it after the run was asked to stop.

        Raises:
            Interrupted: it has not ended by then.
        """

    def commit(self, step: int, checkpoint: Path) -> None:
        """Record that the checkpoint of `step` batches is complete: from now on a resume starts there."""

    def close(self) -> None:
        """Record that no further batch is needed."""


class SharedSource:
    """A source of batches for all ranks. The main rank asks it, and every rank gets the answer.

    `resume_point`, `next_batch` and `end_evaluation` are collective.

    Args:
        source: on the main rank; None on other ranks.
        read: makes a batch from what `BatchSource.next_batch` returned, on every rank; None if that is no batch.
    """

    def __init__(self, source: BatchSource | None, read: Callable[[bytes], TrainingBatch | None]) -> None:
        self._source = source
        self._read = read

    def resume_point(self) -> ResumePoint:
        """See `BatchSource.resume_point`."""
        frame = b"" if self._source is None else bytes(encode_frame(self._source.resume_point()))
        resume_point: ResumePoint = FrameDecoder().feed(broadcast_bytes(frame))[0].message
        return resume_point

    def next_batch(self, step: int) -> TrainingBatch | None:
        """Return the batch of `step`, or None if servers need the weights in a folder first. Raises as `_from_main`."""
        return self._read(self._from_main(lambda source: source.next_batch(step)))

    def begin_evaluation(self) -> None:
        """See `BatchSource.begin_evaluation`."""
        if self._source is not None:
            self._source.begin_evaluation()

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """Wait for the evaluation and return its metrics. Raises as `_from_main`."""
        payload = self._from_main(lambda source: json.dumps(source.end_evaluation(patience_s)).encode())
        metrics: dict[str, float] = json.loads(payload)
        return metrics

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        if self._source is not None:
            self._source.commit(step, checkpoint)

    def close(self) -> None:
        """See `BatchSource.close`."""
        if self._source is not None:
            self._source.close()

    def _from_main(self, ask: Callable[[BatchSource], bytes]) -> bytes:
        """Ask the source on the main rank, and return its answer on every rank.

        Raises:
            Interrupted: on every rank, if the run was asked to stop, or if the rollouts failed: their error is its
                `failure` on the main rank. The parameters are sound in both cases.
            PeerClosed, DiskError: on the main rank alone, as no checkpoint can be committed. The other ranks wait
                until the driver ends them.
        """
        answer: bytes | None = None
        failure: RunError | None = None
        if self._source is not None:
            try:
                answer = ask(self._source)
            except (PeerClosed, DiskError):
                raise
            except Interrupted:
                pass
            except RunError as error:
                failure = error
        if broadcast(float(is_main() and answer is None)):
            raise Interrupted(failure)
        return broadcast_bytes(answer or b"")
