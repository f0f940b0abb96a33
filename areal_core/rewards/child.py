"""A reward process: a child of the process that scores, over a pair of sockets that nobody else can reach."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING

from areal_core.config import CONFIG_FILE, public_environment
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.launchers.guard import bound_log, kill_tree, last_words
from areal_core.messages import Peer, PeerClosed, adopt
from areal_core.messages.scores import WorkerReady

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class RewardProcess:
    """One that has started and is ready.

    Attributes:
        name: of its log.
        peer: the connection to it.
        max_concurrency: requests that it works on at a time.
    """

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process, peer: Peer) -> None:
        self.name, self.peer, self.max_concurrency = name, peer, 1
        self._log, self._process = log, process

    @classmethod
    async def start(
        cls, name: str, run_dir: Path, timeout_s: float, program: Sequence[str] = ("-m", "areal_core.rewards.worker")
    ) -> RewardProcess:
        """Start one and wait until it has loaded the run's rewards.

        Raises:
            RunError: it has ended before, or takes too long; with its own words.
        """
        own, theirs = socket.socketpair()
        log = run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        bound_log(log)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *program, str(run_dir), str(theirs.fileno())),
                env={**public_environment((run_dir / CONFIG_FILE).read_text()), "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        made = cls(name, log, process, await adopt(own))
        try:
            async with asyncio.timeout(timeout_s):
                ready = await made.peer.receive()
            assert isinstance(ready, WorkerReady)
            made.max_concurrency = ready.max_concurrency
        except TimeoutError:
            await made.end()
            raise RunError(f"a reward process is not ready: it took longer than {timeout_s:g} s") from None
        except PeerClosed:
            end = await made.wait()
            raise RunError(f"a reward process is not ready: it {end.describe()}") from None
        except BaseException:
            await made.end()
            raise
        return made

    async def wait(self) -> ProcessEnd:
        """Until it has ended, which it is about to."""
        return ProcessEnd(await self._process.wait(), last_words(self._log))

    def bound_log(self) -> None:
        """To be called now and then: a reward may print without end."""
        bound_log(self._log)

    async def end(self) -> ProcessEnd:
        """End it and what it has started; safe to call twice."""
        if self._process.returncode is None:
            kill_tree(self._process.pid)
        await self.peer.close()
        return await self.wait()
