"""Servers of a program that is no run: the fleet starts them on this machine itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.errors import ArealError
from areal_core.gpus import gpu_variables
from areal_core.inference.programs import is_healthy, start_program
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.runtime.logs import append_to_log, last_words
from areal_core.runtime.messages import ColocatedTraining, RestartMember, RoleMembers, ServingMember
from areal_core.runtime.network import free_port, http_address
from areal_core.runtime.process_tree import end_session, kill_tree
from areal_core.runtime.rpc import private_folder
from areal_core.waiting import polls_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.inference.adapter import ServerAdapter
    from areal_core.interfaces.model import ModelReference

HOST = "127.0.0.1"
POLL_S = 0.05
"""Seconds between two checks whether a program is healthy or has ended."""


class LocalServers:
    """A `DriverConnection` for a program that is no run: starts the servers of a fleet on this machine.

    A server that ends after it was healthy is started again. One that ends before that has failed and stays down.

    Args:
        adapter: its settings say how many servers there are, and its `command` starts one.
        log_dir: folder for the log of each server.
        gpus: the GPUs of the servers; None for servers that see all GPUs.

    Attributes:
        model: the model that they serve; set before `watch`.
        processes: the programs, by server's name. Each leads a session.
    """

    def __init__(self, adapter: ServerAdapter, log_dir: Path, gpus: Sequence[int] | None = None) -> None:
        self._adapter = adapter
        self._log_dir = log_dir
        self._gpus = gpus
        self.model: ModelReference | None = None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._report: Callable[[], None] = lambda: None
        self._serving: dict[str, ServingMember] = {}
        self._failed: dict[str, str] = {}
        self._loading: set[str] = set()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._cleanup = ExitStack()

    def watch(self, role: str, changed: Callable[[RoleMembers], None]) -> None:
        """See `DriverConnection.watch`. Starts the servers."""
        self._report = lambda: changed(RoleMembers(role, tuple(self._serving.values()), dict(self._failed)))
        scratch = self._cleanup.enter_context(private_folder())
        for number, gpus in enumerate(self._adapter.settings.gpus_of_servers(self._gpus)):
            name = f"server-{number}"
            self._tasks.append(start_task(self._keep(name, gpus, scratch), f"keeping {name}"))

    def notify(self, message: RestartMember | ColocatedTraining) -> None:
        """See `DriverConnection.notify`. A server that is to be restarted is killed."""
        match message:
            case RestartMember(name):
                kill_tree(self.processes[name].pid)
            case ColocatedTraining(is_active=True):
                self._may_start.clear()
            case ColocatedTraining():
                self._may_start.set()

    def request(self, message: ColocatedTraining, timeout_s: float | None, waiting_for: str) -> asyncio.Task[None]:
        """See `DriverConnection.request`. The answer comes when no server is being started."""
        self.notify(message)
        return start_task(self._wait_for_loading(), waiting_for)

    def log(self, line: str) -> None:
        """See `DriverConnection.log`. There is no run's log; standard error has the line."""

    async def close(self) -> None:
        """End the servers. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.processes.values():
            await asyncio.to_thread(_end, process)
        self._cleanup.close()

    async def _keep(self, name: str, gpus: Sequence[int], scratch: Path) -> None:
        while name not in self._failed:
            await self._may_start.wait()
            self._loading.add(name)
            try:
                await self._run(name, gpus, scratch)
            except ArealError as error:
                self._failed[name] = "; ".join((error.message, *error.hints))
            self._loading.discard(name)
            self._serving.pop(name, None)
            self._report()

    async def _run(self, name: str, gpus: Sequence[int], scratch: Path) -> None:
        """Run a server until it ends.

        Raises:
            ArealError: it cannot be started.
        """
        assert self.model is not None
        port, log = free_port(), self._log_dir / f"{name}.log"
        command = self._adapter.command(self.model, HOST, port, scratch)
        address = command.address or http_address(HOST, port)
        environment = {**os.environ, **(gpu_variables(gpus) if gpus else {})}
        # A server may end when its standard input does: this program has ended then.
        streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with append_to_log(log) as file:
            process = start_program(command, environment, stdout=file, start_new_session=True, **streams)
        self.processes[name] = process
        while process.poll() is None:
            if name in self._loading and await is_healthy(self._adapter, address):
                self._loading.discard(name)
                self._serving[name] = ServingMember(name, address, is_fresh=True)
                self._report()
            await asyncio.sleep(POLL_S)
        _end(process)  # what it has started may still run
        if name in self._loading:
            self._failed[name] = ProcessEnd(process.returncode, last_words(log)).describe()

    async def _wait_for_loading(self) -> None:
        async for _ in polls_async(POLL_S):
            if not self._loading:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    end_session(process)
    if process.stdin is not None:
        process.stdin.close()
