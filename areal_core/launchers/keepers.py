"""Processes of this machine, each under a keeper of its own (`keeper.py`): what a warden is made of.

By itself it is how a program that belongs to no run starts the processes that it needs, such as an inference engine in
a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.interfaces.launcher import Place, ProcessEnd
from areal_core.launchers.identity import is_stopped
from areal_core.launchers.node import free_port, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import Needs, ProcessSpecification

LOG_BYTES = 1 << 26
"""Of a log file, of which there may be two."""
KEEPER_GRACE_S = 5.0
"""Beyond a process's own time to end, until its keeper is killed too."""
POLL_S = 0.01
_PROGRAM = Path(__file__).with_name("keeper.py")
_SET_CHILD_SUBREAPER = 36


class KeptProcess:
    """One process under its keeper; a `RunningProcess`."""

    def __init__(self, name: str, keeper: asyncio.subprocess.Process, keepers: Keepers) -> None:
        self.name = name
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._keeper = keeper
        self._keepers = keepers
        self._ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        start_task(self._follow(), f"following the process {name}")

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper."""
        return self._keeper.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process or its keeper was stopped by a signal or a debugger, and does not go on."""
        pid = self.started.result() if self.started.done() else 0
        return is_stopped(pid) or is_stopped(self.keeper_pid)

    @property
    def has_ended(self) -> bool:
        """Whether it has, and everything that it started."""
        return self._ended.done()

    async def wait(self) -> ProcessEnd:
        """See `RunningProcess.wait`."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Send a signal to the process; nothing happens where it has ended."""
        self._order(f"signal {int(number)}")

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        """See `RunningProcess.end`."""
        self._order(f"end {grace_s}")
        try:
            async with asyncio.timeout(grace_s + KEEPER_GRACE_S):
                return await self.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()  # it was stopped; the process dies with it
            return await self.wait()

    def _order(self, words: str) -> None:
        assert self._keeper.stdin is not None
        if not self._ended.done():
            self._keeper.stdin.write(f"{words}\n".encode())

    async def _follow(self) -> None:
        assert self._keeper.stdout is not None
        end = ProcessEnd(-signal.SIGKILL, "its keeper was killed")
        async for line in self._keeper.stdout:
            facts = json.loads(line)
            if "pid" in facts:
                self.started.set_result(facts["pid"])
            else:
                end = ProcessEnd(facts["code"], facts["last_words"])
        await self._keeper.wait()
        await self._keepers.end_orphans()
        if not self.started.done():
            self.started.set_result(0)
        self._ended.set_result(end)


class Keepers:
    """Starts processes on this machine; a `Processes`.

    Args:
        logs: folder for `<name>.log`.
        environment: added to this program's own, for all of them.
        adopts_orphans: what a keeper that was killed has left comes to this program, and is ended; not for a program
            that has children by other ways, for they would end too.
    """

    def __init__(
        self, logs: Path, environment: Mapping[str, str] | None = None, *, adopts_orphans: bool = False
    ) -> None:
        self._adopts_orphans = adopts_orphans and sys.platform == "linux"
        if self._adopts_orphans:
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._logs, self.host = logs, "127.0.0.1"
        self._environment = {**os.environ, **(environment or {})}
        self.processes: dict[str, KeptProcess] = {}
        self.launching = 0

    async def find_place(self, needs: Needs) -> Place:
        """See `Processes.find_place`: this machine."""
        return Place("", self.host, free_port(), needs.gpus)

    async def adopt(self, name: str) -> None:
        """See `Processes.adopt`: whoever starts processes this way ends them."""

    async def start(self, specification: ProcessSpecification) -> KeptProcess:
        """See `Processes.start`."""
        needs, environment = specification.needs, dict(specification.environment)
        if needs.cores:
            environment.setdefault("OMP_NUM_THREADS", str(needs.cores))
        log = self._logs / f"{specification.name}.log"
        return await self.launch(specification.name, specification.command, environment, needs.gpus, log)

    def stopped(self) -> tuple[str, ...]:
        """Names of processes that were stopped and do not go on."""
        return tuple(name for name, process in self.processes.items() if process.is_stopped)

    async def launch(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], gpus: Sequence[int] | None, log: Path
    ) -> KeptProcess:
        """Start a command under a keeper."""
        variables = {**self._environment, **environment}
        if gpus is not None:
            shown = visible_gpus()
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(shown[gpu] if shown else str(gpu) for gpu in gpus)
        self.launching += 1
        try:
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_PROGRAM), str(log), str(LOG_BYTES), "--", *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=variables,
                start_new_session=True,
            )
            process = KeptProcess(name, keeper, self)
            self.processes = {key: kept for key, kept in self.processes.items() if not kept.has_ended}
            self.processes[name] = process
        finally:
            self.launching -= 1
        await asyncio.shield(process.started)  # one who no longer waits must not end what follows the process
        return process

    async def end_orphans(self) -> None:
        """A keeper has ended: what it may have left has come to this program, and ends too, where it can be ended."""
        deadline = time.monotonic() + KEEPER_GRACE_S
        while self._adopts_orphans and time.monotonic() < deadline:
            # A keeper that is being started is not known yet.
            orphans = set() if self.launching else self._orphans()
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, os.WNOHANG)
            if not orphans and not self.launching:
                return
            await asyncio.sleep(POLL_S)

    def _orphans(self) -> set[int]:
        with contextlib.suppress(OSError):  # a kernel that does not tell
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            return {int(pid) for pid in children} - {process.keeper_pid for process in self.processes.values()}
        return set()

    async def close(self) -> None:
        """End everything at once; safe to call twice."""
        await asyncio.gather(*(process.end() for process in self.processes.values()))
