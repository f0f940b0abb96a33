"""The trainer's end of the rollout controller's channel."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from areal_core.data.batch import PackedBatch
from areal_core.errors import RunError
from areal_core.interfaces.source import Interrupted
from areal_core.messages.channel import BlockingChannel, ChannelClosed, Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLL_S = 0.5
PROGRESS_INTERVAL_S = 15.0


class RolloutClient:
    """Blocking calls to the rollout controller. Rank 0 of the trainer has one.

    Args:
        socket: of the controller.
        timeout_s: for the controller to come up.
        is_interrupted: asked while waiting; a wait ends with `Interrupted` when it says so.
        log: told a line about what is waited for, now and then.
    """

    def __init__(
        self,
        socket: Path,
        *,
        timeout_s: float = 600.0,
        is_interrupted: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._channel = BlockingChannel(socket, timeout_s)
        self._numbers = itertools.count()
        self._replies: dict[int, Message] = {}
        self._is_interrupted = is_interrupted
        self._log = log

    def request(self, kind: str, **fields: Any) -> int:
        """Send a request; `wait` for its number brings the reply."""
        number = next(self._numbers)
        self._send(Message(kind, {"id": number, **fields}))
        return number

    def wait(self, number: int, *, interruptible: bool = False, waiting_for: str = "") -> Message:
        """The reply to a request.

        Raises:
            RunError: the controller reported an error or died.
            Interrupted: only where `interruptible`.
        """
        last_line, question = time.monotonic(), None
        while number not in self._replies:
            if interruptible and self._is_interrupted():
                raise Interrupted
            try:
                reply = self._channel.receive(POLL_S)
            except TimeoutError:
                if waiting_for and question is None and time.monotonic() - last_line > PROGRESS_INTERVAL_S:
                    question, last_line = self.request("describe"), time.monotonic()
                continue
            except ChannelClosed as error:
                raise RunError("the rollout controller has died", hints=["see logs/controller.log"]) from error
            if reply.fields["id"] == question:
                self._log(f"waiting for {waiting_for}: {reply.fields['text']}")
                question = None
            else:
                self._replies[reply.fields["id"]] = reply
        reply = self._replies.pop(number)
        if "error" in reply.fields:
            raise RunError(reply.fields["error"], hints=reply.fields["hints"])
        return reply

    def has_failed(self, number: int) -> bool:
        """Whether the reply to a request is there already, and is an error; does not wait."""
        if number not in self._replies:
            try:
                reply = self._channel.receive(0)
            except (TimeoutError, ChannelClosed):
                return False
            self._replies[reply.fields["id"]] = reply
        return number in self._replies and "error" in self._replies[number].fields

    def call(self, kind: str, **fields: Any) -> Message:
        """Send a request and wait for its reply."""
        return self.wait(self.request(kind, **fields))

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """See `RolloutController.next_batch`.

        Raises:
            Interrupted: the run was asked to stop.
        """
        reply = self.wait(self.request("next_batch", step=step), interruptible=True, waiting_for=f"batch {step}")
        batch = PackedBatch.from_bytes(reply.payload) if reply.payload else None
        return batch, reply.fields["metrics"]

    def close(self) -> None:
        """Say goodbye, so that the controller ends cleanly; safe to call after its death."""
        try:
            self.call("goodbye")
        except RunError:
            pass
        finally:
            self._channel.close()

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise RunError("the rollout controller has died", hints=["see logs/controller.log"]) from error
