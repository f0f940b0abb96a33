"""Servers of a program that is no run: tests, benchmarks, and whoever takes the engine for a library."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec

from areal_core.launchers import describe_exit
from areal_core.processes import last_words, private_folder, start_task
from areal_core.servers import ColocatedTraining, RestartMember, RoleMembers, ServingMember

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.engines import ModelReference
    from areal_hf.config import HFConfig


class Alone:
    """Takes the part of the driver for the servers of a program that is no run: starts them, and again if they end.

    Args:
        settings: of the plugin.
        log_dir: where each server writes.

    Attributes:
        model: that is served.
        processes: that run, by the server's name.
    """

    def __init__(self, settings: HFConfig, log_dir: Path) -> None:
        self._settings, self._log_dir = settings, log_dir
        self.model: ModelReference | None = None
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._serving: dict[str, ServingMember] = {}
        self._failed: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._cleanup = ExitStack()

    def watch(self, role: str, changed: Callable[[RoleMembers], None]) -> None:
        """See `DriverConnection.watch`. Starts the servers."""
        self._report: Callable[[], None] = lambda: changed(
            RoleMembers(role, tuple(self._serving.values()), self._failed)
        )
        folder = self._cleanup.enter_context(private_folder())
        names = [f"server-{number}" for number in range(self._settings.bounds.maximum)]
        self._tasks = [start_task(self._keep(name, folder), f"keeping {name}") for name in names]

    def notify(self, message: RestartMember | ColocatedTraining) -> None:
        """See `DriverConnection.notify`. A server that is to be restarted is killed."""
        if isinstance(message, RestartMember):
            self._kill(message.name)

    def request(self, message: ColocatedTraining, timeout_s: float | None, waiting_for: str) -> Future[object]:
        """See `DriverConnection.request`. These servers share no GPUs with a trainer: there is nothing to wait for."""
        answered: Future[object] = Future()
        answered.set_result(None)
        return answered

    def log(self, line: str) -> None:
        """See `DriverConnection.log`. There is no run's log; standard error has the line."""

    async def _keep(self, name: str, folder: Path) -> None:
        log = self._log_dir / f"{name}.log"
        while True:
            address = f"unix:{folder}/{name}.{len(list(folder.iterdir()))}"
            words = self._settings.model_dump_json(), msgspec.json.encode(self.model).decode(), address
            with log.open("ab") as file:
                process = self.processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "areal_hf", *words),
                    env={**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,
                )
            assert process.stdout is not None
            if is_up := bool(await process.stdout.readline()):
                self._serving[name] = ServingMember(name, address, is_fresh=True)
                self._report()
            code = await process.wait()
            self._serving.pop(name, None)
            if not is_up:
                self._failed[name] = f"{describe_exit(code)}; the end of its log:\n{last_words(log)}"
            self._report()
            if not is_up:
                return

    def _kill(self, name: str) -> None:
        if (process := self.processes.get(name)) is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name, process in self.processes.items():
            self._kill(name)
            await process.wait()
        self._cleanup.close()
