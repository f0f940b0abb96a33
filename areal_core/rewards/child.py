"""A reward process: a child of the rollout worker, connected by a private socket pair."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

from areal_core.config import public_environment
from areal_core.config.resolve import CONFIG_FILE
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.messages.scores import WorkerReady
from areal_core.runtime.logs import append_to_log, bound_log, last_words
from areal_core.runtime.process_tree import kill_tree
from areal_core.runtime.rpc import Peer, PeerClosed, adopt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class RewardProcess:
    """A reward process that has loaded the run's rewards.

    Attributes:
        name: name of the process and of its log.
        peer: connection to the process.
        max_concurrency: number of requests that the process scores concurrently.
    """

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process, peer: Peer) -> None:
        self.name = name
        self.peer = peer
        self.max_concurrency = 1
        self._log = log
        self._process = process

    @classmethod
    async def start(
        cls, name: str, run_dir: Path, timeout_s: float, program: Sequence[str] = ("-m", "areal_core.rewards.worker")
    ) -> RewardProcess:
        """Start a reward process and wait until it has loaded the run's rewards.

        Args:
            name: name of the process.
            run_dir: folder of the run.
            timeout_s: seconds to load the rewards.
            program: arguments of the Python interpreter.

        Raises:
            RunError: the process ended or took too long. The message has the end of its log.
        """
        our_socket, child_socket = socket.socketpair()
        log = run_dir / "logs" / f"{name}.log"
        bound_log(log)
        with append_to_log(log) as file, child_socket:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *program, str(run_dir), str(child_socket.fileno())),
                env={**public_environment((run_dir / CONFIG_FILE).read_text()), "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=(child_socket.fileno(),),
            )
        started = cls(name, log, process, await adopt(our_socket))
        try:
            async with asyncio.timeout(timeout_s):
                ready = await started.peer.receive()
            assert isinstance(ready, WorkerReady)
            started.max_concurrency = ready.max_concurrency
        except TimeoutError:
            await started.end()
            raise RunError(f"a reward process did not load the rewards within {timeout_s:g} s") from None
        except PeerClosed:
            end = await started.wait()
            raise RunError(f"a reward process did not load the rewards: it {end.describe()}") from None
        except BaseException:
            await started.end()
            raise
        return started

    async def wait(self) -> ProcessEnd:
        """Wait for the end of the process. Return its exit code and the end of its log."""
        return ProcessEnd(await self._process.wait(), last_words(self._log))

    def bound_log(self) -> None:
        """Truncate the log if it is too long. Call it regularly: a reward function may print without end."""
        bound_log(self._log)

    async def end(self) -> ProcessEnd:
        """Kill the process and its descendants; safe to call twice. Return how it ended."""
        if self._process.returncode is None:
            kill_tree(self._process.pid)
        await self.peer.close()
        return await self.wait()
