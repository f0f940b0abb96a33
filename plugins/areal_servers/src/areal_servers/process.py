"""Server processes that the run starts on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.launchers.processes import exit_description, last_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_servers.interface import ServerCommand

END_S = 15.0


class ServerProcess:
    """One server as a child process, with a log file; it ends with this process, however this one ends.

    Args:
        log: where its output goes.
        gpus: that it sees; None leaves the environment as it is.
    """

    def __init__(self, log: Path, gpus: Sequence[int] | None = None) -> None:
        self.log = log
        self._gpus = gpus
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: ServerCommand) -> None:
        """Start it; returns at once."""
        environment = {**os.environ, **command.environment}
        if self._gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "areal_servers.keeper", *command.arguments,
                env=environment, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def last_words(self) -> str:
        """How it ended and the end of its log."""
        code = self._process.returncode if self._process else None
        how = "it runs still" if code is None else exit_description(code)
        return f"{how}; the end of its log ({self.log}):\n{last_lines(self.log)}"

    async def end(self) -> None:
        """End it and everything that it started; safe to call twice."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
