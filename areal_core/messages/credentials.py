"""What a process shows to be let in: the run's token and the attempt that it belongs to."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.messages.frames import Message

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOKEN, _ATTEMPT = "AREAL_TOKEN", "AREAL_ATTEMPT"
LASTING = ("guard", "node")
"""Who may come with an older attempt: what they have to say or to offer is of the whole run."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The same in every process of one attempt of a run.

    Attributes:
        token: a secret; without one only this user's own sockets are served.
        attempt: of the run; whoever comes with another one is refused, but for `LASTING` with an older one.
    """

    token: str = ""
    attempt: int = 0

    @classmethod
    def create(cls, attempt: int) -> Credentials:
        """With a new token."""
        return cls(secrets.token_hex(16), attempt)

    @classmethod
    def from_environment(cls) -> Credentials:
        """Those that this process was started with; empty ones outside of a run."""
        return cls.from_variables(os.environ)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Credentials:
        """Those that a process with these environment variables has."""
        return cls(variables.get(_TOKEN, ""), int(variables.get(_ATTEMPT, "0")))

    def as_environment(self) -> dict[str, str]:
        """For a process that is started."""
        return {_TOKEN: self.token, _ATTEMPT: str(self.attempt)}

    def refusal(self, hello: Hello) -> str:
        """Why somebody is not let in; empty for one who is."""
        if not secrets.compare_digest(self.token.encode(), hello.token.encode(errors="replace")):
            return "the token is another run's"
        if hello.attempt != self.attempt and not (hello.name in LASTING and hello.attempt < self.attempt):
            return f"attempt {hello.attempt} of the run is over: it is in attempt {self.attempt}"
        return ""


class Hello(Message):
    """The first message on every connection: who comes.

    Attributes:
        token, attempt: see `Credentials`.
        name: of the process, or what it is for.
    """

    token: str
    attempt: int
    name: str


class Refused(Message):
    """The answer to a `Hello` that is not accepted; the connection closes behind it."""

    reason: str
