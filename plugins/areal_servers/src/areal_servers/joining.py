"""How a program that serves by hand keeps its server in a run, whose owners come and go."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.messages import FrameDecoder, encode_frame
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import Forward, Forwarded
from areal_core.runs import ask_owner
from areal_servers.messages import ServerJoins, ServerLeaves, ServerStanding
from areal_servers.roster import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs import RunFolder

ASK_TIMEOUT_S = 5.0
INTERVAL_S = 1.0
MARGIN_S = 5.0


class Joining:
    """One server and the run that it shall be used by.

    Args:
        run: asked through the owner of its latest epoch.
        name: of the server.
        address: of the server.
        say: told when something has changed, a line each time.
    """

    def __init__(self, run: RunFolder, name: str, address: str, say: Callable[[str], None]) -> None:
        self._run = run
        self._name = name
        self._address = address
        self._say = say
        self._told = ""

    async def renew(self) -> None:
        """Ask to be used, which does nothing where it is so already, and say what has become of the server.

        Raises:
            RunError: the run will not use this server; in the run's words.
        """
        found = await self._ask(ServerJoins(self._name, self._address))
        if isinstance(found, str):
            line = f"{found} in {self._run.path}; the server waits for it (areal run --resume {self._run.path})"
        elif found.state == State.REFUSED:
            raise RunError(f"the run cannot use this server: {found.reason}")
        elif found.state in (State.READY, State.UPDATING):
            line = f"in use by the run in {self._run.path} as {self._name}"
        else:
            line = f"not in use yet: {found.reason or found.state}"
        if line != self._told:
            self._told = line
            self._say(line)

    async def leave(self, patience_s: float) -> None:
        """Ask the run to let go, and return when it has, or when nobody is there to do so."""
        deadline = time.monotonic() + patience_s + MARGIN_S
        while time.monotonic() < deadline:
            found = await self._ask(ServerLeaves(self._name, self._address))
            if isinstance(found, str) or found.state in ("", State.GONE, State.REFUSED):
                return
            await asyncio.sleep(INTERVAL_S)

    async def _ask(self, question: object) -> ServerStanding | str:
        """The run's answer; in words why there is none."""
        epoch = self._run.last_epoch
        if epoch is None or epoch.released.exists():
            return "no run is in progress"
        request = Forward("controller", b"".join(encode_frame(question)))
        answer = await asyncio.to_thread(ask_owner, epoch, request, ASK_TIMEOUT_S)
        if not isinstance(answer, Forwarded):
            return answer.text if isinstance(answer, Failed) else "nobody answers for the run"
        reply = FrameDecoder().feed(answer.reply)[0].message
        if isinstance(reply, Failed):
            raise RunError(reply.text, hints=reply.hints)
        assert isinstance(reply, ServerStanding)
        return reply
