"""Members on this machine: forks of one process that has imported what takes long, or a process each."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node, describe_exit
from areal_core.launchers.forking import Forked, ForkServer
from areal_core.launchers.guard import kill_tree
from areal_core.launchers.machine import count_gpus
from areal_core.launchers.places import member_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import Place, ProcessGroup
    from areal_core.launchers.settings import LocalSettings

HERE = "this machine"
END_S = 5.0
"""For what was killed to be gone."""


class LocalLauncher:
    """See `Launcher`. Members have sessions of their own: a terminal's Ctrl-C reaches the driver alone."""

    host = "127.0.0.1"

    def __init__(self, settings: LocalSettings) -> None:
        self._server = ForkServer() if settings.fork_server else None  # imports while the run is being checked
        self._groups: list[Spawned] = []

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: this machine, with the GPUs that it shows."""
        return [Node(HERE, self.host, count_gpus())]

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Spawned:
        """See `Launcher.start`."""
        told = [
            {**environment, **group.environment, **member_environment(group, {index: place})}
            for index, place in places.items()
        ]
        if self._server is not None and list(group.command[:2]) == [sys.executable, "-m"]:
            if not self._server.is_alive:  # it was killed
                self._server = ForkServer()
            if (threads := await self._server.threads()) == 1:
                forks = [self._server.fork(group.command[2:], {**os.environ, **own}) for own in told]
                spawned = Spawned(await asyncio.gather(*forks))
                self._groups.append(spawned)
                return spawned
            sys.stderr.write(f"what is imported has started {threads} threads: processes are started one by one\n")
            self._server.close()
            self._server = None
        spawned = await spawn(group.command, told)
        self._groups.append(spawned)
        return spawned

    async def close(self) -> None:
        """See `Launcher.close`."""
        await asyncio.gather(*(group.end() for group in self._groups))
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


class Spawned:
    """Processes of this machine; a `RunningGroup`."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process | Forked]) -> None:
        self._processes = processes

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        return ", ".join(map(describe_exit, codes))

    def signal(self, number: int) -> None:
        """Send a signal to each: it reaches the member, which tells the driver."""
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        for process in self._processes:
            if process.returncode is None:  # not process.kill(), which reaps: asyncio then sees exit code 255
                kill_tree(process.pid)
        await asyncio.wait({asyncio.ensure_future(self.wait())}, timeout=END_S)  # one in the kernel may not end at all


async def spawn(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Spawned:
    """Start a command once with each of some variables.

    Raises:
        RunError: it cannot be started.
    """
    processes: list[asyncio.subprocess.Process] = []
    for environment in environments:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            await Spawned(processes).end()
            raise RunError(f"{command[0]} cannot be started on this machine: {error}") from None
        processes.append(process)
    return Spawned(processes)
