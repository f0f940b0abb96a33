"""On a node: the actor that holds the run's share of it, and the warden as long as it lives.

Ray kills an actor's children with it, at once and only those: what they have started survives. So the warden is no
child (`setsid --fork`); it sees the actor's end in its standard input, and has the time to end everything.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.launchers.identity import processes_with

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAST_WORDS = 2000
MARK = "AREAL_RAY_ACTOR"
"""Variable by which the actor finds what it has started."""
KILL_S = 5.0
POLL_S = 0.02
SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")


class WardenActor:
    """Starts a warden, waits for its end, and ends it; its methods run in threads of one process.

    Args:
        has_gpus: whether the node has GPUs for the run; without, Ray leaves all of its GPUs in sight.
        own: variables that stay although Ray sets their like.
    """

    def __init__(self, has_gpus: bool, own: Mapping[str, str]) -> None:
        self._mark = secrets.token_hex(8)
        self._warden: subprocess.Popen[bytes] | None = None
        self._variables = {
            name: value
            for name, value in os.environ.items()
            if name not in SET_BY_RAY and not name.startswith(("RAY_", "__RAY"))
        }
        self._variables |= {**own, MARK: self._mark}
        if not has_gpus:
            self._variables["CUDA_VISIBLE_DEVICES"] = ""

    def node_id(self) -> str:
        """Where it stands; the answer comes when there is room for it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def hold(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the warden and wait until it has ended; why.

        Args:
            command: the warden, which must end when its standard input does.
            environment: added to the node's own.
            folder: for it to work in, where the node has it.
        """
        with suppress(OSError):  # Ray gives its workers less of a share; only root may take it back
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if not os.access(command[0], os.X_OK):
            return f"there is no program {command[0]} on it: areal must be installed at the same place on all nodes"
        warden = self._warden = subprocess.Popen(
            ["setsid", "--fork", *command],
            env={**self._variables, **environment},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert warden.stdout is not None
        words = b""
        while data := os.read(warden.stdout.fileno(), 4096):
            words = (words + data)[-LAST_WORDS:]
        warden.wait()
        said = words.decode(errors="replace").strip()
        return f"its warden has ended: {said}" if said else "its warden has ended"

    def end(self, grace_s: float) -> list[int]:
        """End the warden, and with it everything on this node; processes that are still there.

        Args:
            grace_s: for it to end everything in order, before all is killed.
        """
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
        began = time.monotonic()
        while (left := processes_with(MARK, self._mark)) and time.monotonic() - began < grace_s + KILL_S:
            if time.monotonic() - began > grace_s:
                for pid in left:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        return left
