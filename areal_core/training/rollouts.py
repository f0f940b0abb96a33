"""The trainer's end of the messages with the rollout controller."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from areal_core.data.batch import PackedBatch
from areal_core.errors import RunError
from areal_core.messages import BlockingChannel, ChannelClosed
from areal_core.messages import rollouts as messages
from areal_core.messages.credentials import Failed
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLL_S = 0.5
PROGRESS_INTERVAL_S = 15.0
SILENCE_S = 600.0
"""A controller that answers nothing at all for so long, not even how its rollouts are, is lost."""


class RolloutClient:
    """Requests to the rollout controller; a `BatchSource`. Rank 0 of the trainer has one.

    Args:
        address: of the controller.
        timeout_s: for the controller to come up.
        is_interrupted: asked while waiting; a wait for a batch ends with `Interrupted` when it says so.
        log: told a line about what is waited for, now and then.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        is_interrupted: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._channel = BlockingChannel.connect(address, timeout_s, "trainer-0")
        self._replies: dict[int, Any] = {}
        self._evaluation = 0  # number of the request
        self._is_interrupted = is_interrupted
        self._log = log

    def request(self, message: Any) -> int:
        """Send a request; `wait` for its number brings the reply."""
        return self._channel.send_request(message)

    def wait(self, number: int, waiting_for: str, *, patience_s: float = math.inf) -> Any:
        """The reply to a request.

        Args:
            number: of the request.
            waiting_for: what the reply brings, in words.
            patience_s: how long the wait goes on once the run has been asked to stop.

        Raises:
            RunError: the controller reported an error, or has been silent for too long.
            ChannelClosed: it has died.
            Interrupted: the run was asked to stop, and the reply has not come within `patience_s`.
        """
        heard = last_line = time.monotonic()
        question, deadline = None, math.inf
        while number not in self._replies:
            if deadline == math.inf and self._is_interrupted():
                deadline = time.monotonic() + patience_s
                if 0 < patience_s < math.inf:
                    self._log(f"asked to stop: {waiting_for} has {patience_s:g} s to end")
            if time.monotonic() >= deadline:
                raise Interrupted
            if self._receive(POLL_S):
                heard = time.monotonic()
            now = time.monotonic()
            if question is not None and question in self._replies:
                self._log(f"waiting for {waiting_for}: {self._replies.pop(question).text}")
                question = None
            if now - heard > SILENCE_S:
                raise RunError(f"the rollout controller is silent since {now - heard:.0f} s: waited for {waiting_for}")
            if question is None and now - last_line > PROGRESS_INTERVAL_S:
                question, last_line = self.request(messages.Describe()), now
        reply = self._replies.pop(number)
        if isinstance(reply, Failed):
            raise reply.error
        return reply

    def call(self, message: Any, waiting_for: str) -> Any:
        """Send a request and wait for its reply; raises as `wait`."""
        return self.wait(self.request(message), waiting_for)

    def has_failed(self, number: int) -> bool:
        """Whether the reply to a request is there already, and is an error; does not wait."""
        self._receive(0.0)
        return isinstance(self._replies.get(number), Failed)

    def where_to_begin(self) -> messages.Beginning:
        """See `BatchSource.where_to_begin`."""
        beginning: messages.Beginning = self.call(messages.WhereToBegin(), "the step to begin with")
        return beginning

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """See `BatchSource.next_batch`."""
        reply = self.wait(self.request(messages.NextBatch(step)), f"batch {step}", patience_s=0.0)
        return PackedBatch.from_bytes(reply.packed) if reply.packed else None, dict(reply.metrics)

    def begin_evaluation(self) -> None:
        """See `BatchSource.begin_evaluation`."""
        self._evaluation = self.request(messages.Evaluate())

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """See `BatchSource.end_evaluation`."""
        return dict(self.wait(self._evaluation, "the evaluation", patience_s=patience_s).metrics)

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        self.call(messages.Commit(step, checkpoint), "the ledger's commit")

    def close(self) -> None:
        """Say goodbye, so that the controller ends cleanly; safe to call after its death."""
        try:
            self.call(messages.Goodbye(), "the controller's goodbye")
        except RunError:
            pass
        finally:
            self._channel.close()

    def _receive(self, timeout_s: float) -> bool:
        """Take what has arrived; whether anything has."""
        try:
            frame = self._channel.receive(timeout_s)
        except TimeoutError:
            return False
        except ChannelClosed as error:
            raise ChannelClosed("the rollout controller has died", hints=["see logs/controller.log"]) from error
        self._replies[-frame.number] = frame.message
        return True
