"""The main rank's connection to the rollout controller."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.interfaces.transport import RolloutConnection
from areal_core.messages import rollouts as messages
from areal_core.runtime.rpc import LoopThread, Message, Peer, PeerClosed, connect, encode_frame
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.interfaces.inference import TensorDescription

POLL_S = 0.5
"""Seconds between two checks whether the run was asked to stop, while a reply is awaited."""


class RolloutClient(RolloutConnection):
    """Requests to the rollout controller; also a `BatchSource`.

    Args:
        address: of the controller.
        timeout_s: seconds in which the controller must accept the connection.
        is_interrupted: returns whether the run was asked to stop. It is called while a reply is awaited.
        log: takes a line for the user.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        is_interrupted: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._thread = LoopThread("connection to the rollout controller")
        self._peer: Peer = self._thread.call(connect(address, timeout_s, "trainer-0"))
        self._evaluation: Future[Any] = Future()
        self._is_interrupted = is_interrupted
        self._log = log

    def request(self, message: Message) -> Future[Any]:
        """See `RolloutConnection.request`."""
        return self._thread.start(self._peer.request(message, None, type(message).__name__))

    def sync_weights(
        self, version: int, trained: int, tensors: Sequence[TensorDescription] = (), folder: Path | None = None
    ) -> Future[Any]:
        """See `RolloutConnection.sync_weights`. The weights are in `folder` if it is set."""
        return self.request(messages.SyncWeights(version, trained, folder, tuple(tensors)))

    def wait(self, reply: Future[Any], *, patience_s: float = math.inf, awaited: str = "the reply") -> Any:
        """Return the reply to a request.

        Args:
            reply: what `request` returned.
            patience_s: seconds to wait after the run was asked to stop.
            awaited: what the reply brings, for the log line that the wait then has an end.

        Raises:
            RunError: the controller reported an error.
            PeerClosed: the controller has died.
            Interrupted: the run was asked to stop, and the reply has not come within `patience_s`.
        """
        deadline = math.inf
        while True:
            if deadline == math.inf and self._is_interrupted():
                deadline = time.monotonic() + patience_s
                if 0 < patience_s < math.inf:
                    self._log(f"asked to stop: {awaited} has {patience_s:g} s to end")
            if time.monotonic() >= deadline and not reply.done():
                raise Interrupted
            try:
                return reply.result(POLL_S)
            except PeerClosed as error:
                raise PeerClosed("the rollout controller has died", hints=["see logs/controller.log"]) from error
            except TimeoutError:
                pass

    def call(self, message: Message) -> Any:
        """See `RolloutConnection.call`."""
        return self.wait(self.request(message))

    def has_failed(self, reply: Future[Any]) -> bool:
        """See `RolloutConnection.has_failed`."""
        return reply.done() and reply.exception() is not None

    def resume_point(self) -> messages.ResumePoint:
        """See `BatchSource.resume_point`."""
        resume_point: messages.ResumePoint = self.call(messages.AskResumePoint())
        return resume_point

    def next_batch(self, step: int) -> bytes:
        """See `BatchSource.next_batch`. Returns the frame of a `Manifest` or of `FolderNeeded`."""
        reply = self.wait(self.request(messages.NextBatch(step)), patience_s=0.0)
        return bytes(encode_frame(reply))

    def begin_evaluation(self) -> None:
        """See `BatchSource.begin_evaluation`."""
        self._evaluation = self.request(messages.Evaluate())

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """See `BatchSource.end_evaluation`."""
        return dict(self.wait(self._evaluation, patience_s=patience_s, awaited="the evaluation").metrics)

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        self.call(messages.Commit(step, checkpoint))

    def close(self) -> None:
        """Let the controller end, and close the connection. The controller may have died before."""
        with suppress(RunError):
            self.call(messages.Goodbye())
        self._thread.call(self._peer.close())
        self._thread.close()
