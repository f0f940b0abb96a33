"""How a program that serves by hand keeps its server in a run, whose attempts come and go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding
from areal_core.runtime.attempts import ask_role
from areal_core.runtime.rpc import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runtime.folder import RunFolder

ASK_TIMEOUT_S = 5.0
INTERVAL_S = 1.0
MARGIN_S = 5.0


class Joining:
    """One server and the run that it shall be used by.

    Args:
        run: asked through the driver of its latest attempt.
        name: of the server.
        address: of the server.
        log: told when something has changed, a line each time.
    """

    def __init__(self, run: RunFolder, name: str, address: str, log: Callable[[str], None]) -> None:
        self._run = run
        self._name = name
        self._address = address
        self._log = log
        self._told = ""

    def renew(self) -> None:
        """Ask to be used, which does nothing where it is so already, and say what has become of the server.

        Raises:
            RunError: the run will not use this server; in the run's words.
        """
        found = self._ask(ServerJoins(self._name, self._address))
        if isinstance(found, str):
            line = f"{found} in {self._run.path}; the server waits for it (areal run --resume {self._run.path})"
        elif found.state == "refused":
            raise RunError(f"the run cannot use this server: {found.reason}")
        elif found.state in ("ready", "updating"):
            line = f"in use by the run in {self._run.path} as {self._name}"
        else:
            line = f"not in use yet: {found.reason or found.state}"
        if line != self._told:
            self._told = line
            self._log(line)

    def leave(self, patience_s: float) -> None:
        """Ask the run to let go, and return when it has, or when nobody is there to do so."""
        deadline = time.monotonic() + patience_s + MARGIN_S
        while time.monotonic() < deadline:
            found = self._ask(ServerLeaves(self._name, self._address))
            if isinstance(found, str) or found.state in ("", "gone", "refused"):
                return
            time.sleep(INTERVAL_S)

    def _ask(self, question: ServerJoins | ServerLeaves) -> ServerStanding | str:
        """The run's answer; in words why there is none."""
        attempt = self._run.last_attempt
        if attempt is None or attempt.released.exists():
            return "no run is in progress"
        reply = ask_role(attempt, "controller", question, ASK_TIMEOUT_S)
        if isinstance(reply, Failed):
            raise RunError(reply.text, hints=reply.hints)
        return reply if isinstance(reply, ServerStanding) else str(reply)
