"""A process that listens, as whoever has it started sees it: found a place for, started, and started again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.interfaces.launcher import EndMeans, Needs, Place, ProcessSpecification

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import ProcessEnd, Processes, RunningProcess

NOTHING = Needs()
GRACE_S = 5.0
"""Seconds that a process has to end by itself."""


class LaunchedProcess:
    """One process that is started, and started again where need be.

    Args:
        processes: start it.
        name: of the process; its output goes to the log of this name.
        needs: of its node.
        secret: taken out of what it said last, for some programs write their settings into their logs.
    """

    def __init__(self, processes: Processes, name: str, needs: Needs = NOTHING, secret: str = "") -> None:
        self.name = name
        self._secret = secret
        self._processes = processes
        self._needs = needs
        self._place = Place("", "", 0, needs.gpus)
        self._process: RunningProcess | None = None
        self._ended: asyncio.Task[ProcessEnd] | None = None

    async def adopt(self) -> str:
        """Take over the process that a former owner has left; its address, empty where none runs."""
        if found := await self._processes.adopt(self.name):
            self._hold(found[0])
        return f"http://{found[1].address}:{found[1].port}" if found else ""

    async def find_place(self) -> Place:
        """Where it can stand, and will be started.

        Raises:
            RunError: there is no room for it.
        """
        self._place = await self._processes.find_place(self._needs)
        return self._place

    async def start(self, role: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it where `find_place` found room, and return at once.

        Raises:
            RunError: there is no room for it any more.
        """
        words = self.name, role, command, environment, Needs(gpus=self._place.gpus), self._place.node
        specification = ProcessSpecification(*words, end=EndMeans.REPLACED, port=self._place.port)
        self._hold(await self._processes.start(specification))

    @property
    def gpus(self) -> Sequence[int]:
        """That it was given."""
        return self._place.gpus or ()

    def _hold(self, process: RunningProcess) -> None:
        self._process, self._ended = process, start_task(process.wait(), f"end of {self.name}")

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._ended is not None and not self._ended.done()

    def last_words(self) -> str:
        """How it ended and the end of its log."""
        if self._ended is None or not self._ended.done():
            return f"it runs still, and writes {self.name}.log"
        words = self._ended.result().describe()
        return f"{self.name}.log: {words.replace(self._secret, '***') if self._secret else words}"

    async def end(self, grace_s: float = GRACE_S) -> None:
        """End it and everything that it started; safe to call twice."""
        if self._process is not None and self._ended is not None:
            await self._process.end(grace_s)
            await asyncio.wait({self._ended})  # one who no longer waits must not cancel it
