"""The trainer's end of the messages with the rollout controller."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.messages import LoopThread, Message, Peer, PeerClosed, connect, encode_frame
from areal_core.messages import rollouts as messages
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLL_S = 0.5


class RolloutClient:
    """Requests to the rollout controller; a `BatchSource`. Rank 0 of the trainer has one.

    Args:
        address: of the controller.
        timeout_s: for the controller to come up.
        is_interrupted: asked while waiting; a wait for a batch ends with `Interrupted` when it says so.
        log: told what still has time to end once the run was asked to stop.
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
        """Send a request; `wait` brings the reply."""
        return self._thread.start(self._peer.request(message, None, type(message).__name__))

    def wait(self, reply: Future[Any], *, patience_s: float = math.inf, waiting_for: str = "the reply") -> Any:
        """The reply to a request.

        Args:
            reply: what `request` gave.
            patience_s: how long the wait goes on once the run has been asked to stop.
            waiting_for: what the reply brings, in words; told then.

        Raises:
            RunError: the controller reported an error.
            PeerClosed: it has died.
            Interrupted: the run was asked to stop, and the reply has not come within `patience_s`.
        """
        deadline = math.inf
        while True:
            if deadline == math.inf and self._is_interrupted():
                deadline = time.monotonic() + patience_s
                if 0 < patience_s < math.inf:
                    self._log(f"asked to stop: {waiting_for} has {patience_s:g} s to end")
            if time.monotonic() >= deadline and not reply.done():
                raise Interrupted
            try:
                return reply.result(POLL_S)
            except PeerClosed as error:
                raise PeerClosed("the rollout controller has died", hints=["see logs/controller.log"]) from error
            except TimeoutError:
                pass

    def call(self, message: Message) -> Any:
        """Send a request and wait for its reply; raises as `wait`."""
        return self.wait(self.request(message))

    def has_failed(self, reply: Future[Any]) -> bool:
        """Whether the reply to a request is there already, and is an error; does not wait."""
        return reply.done() and reply.exception() is not None

    def where_to_begin(self) -> messages.Beginning:
        """See `BatchSource.where_to_begin`."""
        beginning: messages.Beginning = self.call(messages.WhereToBegin())
        return beginning

    def next_batch(self, step: int) -> bytes:
        """See `BatchSource.next_batch`: the frame of a `Manifest`."""
        manifest = self.wait(self.request(messages.NextBatch(step)), patience_s=0.0)
        return bytes(encode_frame(manifest))

    def begin_evaluation(self) -> None:
        """See `BatchSource.begin_evaluation`."""
        self._evaluation = self.request(messages.Evaluate())

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """See `BatchSource.end_evaluation`."""
        return dict(self.wait(self._evaluation, patience_s=patience_s, waiting_for="the evaluation").metrics)

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        self.call(messages.Commit(step, checkpoint))

    def close(self) -> None:
        """Say goodbye, so that the controller ends cleanly; safe to call after its death."""
        with suppress(RunError):
            self.call(messages.Goodbye())
        self._thread.call(self._peer.close())
