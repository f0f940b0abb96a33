"""The launcher of this machine: members are forks of a fork server, or programs that are started one by one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.gpus import count_gpus
from areal_core.interfaces.launcher import Node, describe_exit
from areal_core.runtime.environment import member_environment
from areal_core.runtime.fork_server import ForkedProcess, ForkServer
from areal_core.runtime.process_tree import kill_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import Place, ProcessGroup
    from areal_core.runtime.settings import LocalSettings

HERE = "this machine"
"""Name of the only node."""
END_TIMEOUT_S = 5.0
"""Seconds in which killed processes must be gone."""


class LocalLauncher:
    """See `Launcher`.

    Members have sessions of their own, so a terminal's Ctrl-C reaches only the driver.
    """

    host = "127.0.0.1"

    def __init__(self, settings: LocalSettings) -> None:
        # Start it early: it imports while the run is being checked.
        self._fork_server = ForkServer() if settings.fork_server else None
        self._groups: list[LocalGroup] = []

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: this machine, with its visible GPUs."""
        return [Node(HERE, self.host, count_gpus())]

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> LocalGroup:
        """See `Launcher.start`. A command `python -m MODULE` is forked."""
        environments = [
            {**environment, **group.environment, **member_environment(group, {index: place})}
            for index, place in places.items()
        ]
        is_module = list(group.command[:2]) == [sys.executable, "-m"]
        fork_server = await self._usable_fork_server() if is_module else None
        if fork_server is None:
            running = await spawn(group.command, environments)
        else:
            forks = [fork_server.fork(group.command[2:], {**os.environ, **variables}) for variables in environments]
            running = LocalGroup(await asyncio.gather(*forks))
        self._groups.append(running)
        return running

    async def _usable_fork_server(self) -> ForkServer | None:
        """Return the fork server, and start another one if it was killed; None if it cannot fork or is not wanted."""
        if self._fork_server is not None and not self._fork_server.is_alive:
            self._fork_server = ForkServer()
        server = self._fork_server
        if server is None:
            return None
        threads = await server.threads()
        if threads == 1:
            return server
        if self._fork_server is server:  # else another call has closed it
            self._fork_server = None
            sys.stderr.write(
                f"the fork server has {threads} threads after its imports and cannot fork: each process imports alone\n"
            )
            await asyncio.to_thread(server.close)
        return None

    async def close(self) -> None:
        """See `Launcher.close`."""
        await asyncio.gather(*(group.end() for group in self._groups))
        if self._fork_server is not None:
            await asyncio.to_thread(self._fork_server.close)


class LocalGroup:
    """Processes of this machine; see `RunningGroup`.

    Example:
        >>> import asyncio
        >>> import signal
        >>> from areal_core.launchers import LocalGroup, spawn
        >>> async def stop() -> str:
        ...     group: LocalGroup = await spawn(["sleep", "60"], [{}])
        ...     group.signal(signal.SIGTERM)
        ...     return await group.wait()
        >>> asyncio.run(stop())
        'was killed by SIGTERM'
    """

    def __init__(self, processes: Sequence[asyncio.subprocess.Process | ForkedProcess]) -> None:
        self._processes = processes

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        return ", ".join(map(describe_exit, codes))

    def signal(self, number: int) -> None:
        """Send a signal to each process. A guard passes it on to its member.

        The member reports SIGTERM and SIGUSR1 to the driver, and ignores SIGINT and SIGHUP.
        """
        for process in self._processes:
            if process.returncode is not None:
                continue
            if isinstance(process, ForkedProcess):
                process.send_signal(number)
            else:
                # Do not use its `send_signal`: it reaps the process, and asyncio then reports the exit code 255.
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        for process in self._processes:
            if process.returncode is not None:
                continue
            if isinstance(process, ForkedProcess):
                process.send_signal(signal.SIGKILL)  # the fork server kills what the member leaves behind
            else:
                kill_tree(process.pid)  # `process.kill` reaps it, as `send_signal` does
        # A process that hangs in a system call may not end at all.
        await asyncio.wait({asyncio.ensure_future(self.wait())}, timeout=END_TIMEOUT_S)


async def spawn(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> LocalGroup:
    """Start a command once for each environment, which is added to this program's.

    Raises:
        RunError: the command cannot be started.

    Example:
        >>> import asyncio
        >>> from areal_core.launchers import spawn
        >>> async def main() -> str:
        ...     group = await spawn(["sh", "-c", "exit $CODE"], [{"CODE": "0"}, {"CODE": "3"}])
        ...     return await group.wait()
        >>> asyncio.run(main())
        'ended with exit code 0, ended with exit code 3'
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
            await LocalGroup(processes).end()
            raise RunError(f"{command[0]} cannot be started on this machine: {error}") from None
        processes.append(process)
    return LocalGroup(processes)
