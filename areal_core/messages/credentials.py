"""What a process shows to be let in: the run's token and epoch."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from areal_core.errors import LostError, RunError
from areal_core.messages.codec import message

_TOKEN, _EPOCH = "AREAL_TOKEN", "AREAL_EPOCH"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The same in every process of one epoch of a run.

    Attributes:
        token: a secret; without one only this user's own sockets are served.
        epoch: of the run; whoever comes with another one is refused, but for wardens with an older one.
    """

    token: str = ""
    epoch: int = 0

    @classmethod
    def create(cls, epoch: int) -> Credentials:
        """With a new token."""
        return cls(secrets.token_hex(16), epoch)

    @classmethod
    def from_environment(cls) -> Credentials:
        """Those that the warden gave this process; empty ones outside of a run."""
        return cls(os.environ.get(_TOKEN, ""), int(os.environ.get(_EPOCH, "0")))

    def as_environment(self) -> dict[str, str]:
        """For a process that is started."""
        return {_TOKEN: self.token, _EPOCH: str(self.epoch)}

    def refusal(self, hello: Hello) -> str:
        """Why somebody is not let in; empty for one who is."""
        if not secrets.compare_digest(self.token.encode(), hello.token.encode(errors="replace")):
            return "the token is another run's"
        # A warden that comes has nothing of any epoch yet, and may have been told one that is over meanwhile.
        if hello.epoch != self.epoch and not (hello.name == "warden" and hello.epoch < self.epoch):
            return f"epoch {hello.epoch} of the run is over: it is in epoch {self.epoch}"
        return ""


@message
class Hello:
    """The first message on every connection: who comes.

    Attributes:
        token, epoch: see `Credentials`.
        name: of the process, or what it is for.
    """

    token: str
    epoch: int
    name: str


@message
class Refused:
    """The answer to a `Hello` that is not accepted; the connection closes behind it."""

    reason: str


@message
class Failed:
    """The reply to a request that failed: an error of areal, as it is told.

    Attributes:
        text: what is wrong.
        hints: what can be done.
        is_loss: see `LostError`.
    """

    text: str
    hints: tuple[str, ...] = ()
    is_loss: bool = False

    @property
    def error(self) -> RunError:
        """What the requester raises."""
        return (LostError if self.is_loss else RunError)(self.text, hints=self.hints)
