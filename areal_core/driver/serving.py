"""Keeps a server that was started by hand in a run, across the run's attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding
from areal_core.runtime.attempts import ask_role
from areal_core.runtime.rpc import Failed
from areal_core.waiting import polls

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runtime.folder import RunFolder

ASK_TIMEOUT_S = 5.0
"""Seconds for the controller of a run to answer."""
INTERVAL_S = 1.0
"""Seconds between two requests to leave."""
MARGIN_S = 5.0
"""Seconds in addition to `patience_s` for the run to release the server."""


class Joining:
    """One server and the run that shall use it.

    Args:
        run: the run. Requests go through the driver of its latest attempt.
        name: name of the server.
        address: address of the server.
        log: called with a line whenever the server's state in the run has changed.
    """

    def __init__(self, run: RunFolder, name: str, address: str, log: Callable[[str], None]) -> None:
        self._run = run
        self._name = name
        self._address = address
        self._log = log
        self._last_line = ""

    def renew(self) -> None:
        """Ask the run to use the server, and log the server's state if it has changed. Safe to repeat.

        Raises:
            RunError: the run refuses the server; the message has the reason.
        """
        state = self._ask(ServerJoins(self._name, self._address))
        if isinstance(state, str):
            line = f"{state} in {self._run.path}; the server waits for it (areal run --resume {self._run.path})"
        elif state.state == "refused":
            raise RunError(f"the run cannot use this server: {state.reason}")
        elif state.state in ("ready", "updating"):
            line = f"in use by the run in {self._run.path} as {self._name}"
        else:
            line = f"not in use yet: {state.reason or state.state}"
        if line != self._last_line:
            self._last_line = line
            self._log(line)

    def leave(self, patience_s: float) -> None:
        """Ask the run to release the server. Return when it has done so, when the run is gone, or after a timeout.

        Args:
            patience_s: seconds that the server's requests may take to end.
        """
        for _ in polls(INTERVAL_S, patience_s + MARGIN_S):
            state = self._ask(ServerLeaves(self._name, self._address))
            if isinstance(state, str) or state.state in ("", "refused"):
                return

    def _ask(self, request: ServerJoins | ServerLeaves) -> ServerStanding | str:
        """Return the server's state in the run, or why the run does not answer."""
        attempt = self._run.last_attempt
        if attempt is None or attempt.released.exists():
            return "no run is in progress"
        reply = ask_role(attempt, "controller", request, ASK_TIMEOUT_S)
        if isinstance(reply, Failed):
            raise RunError(reply.text, hints=reply.hints)
        return reply if isinstance(reply, ServerStanding) else str(reply)
