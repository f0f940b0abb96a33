"""Ray actor that starts one member of the run on a node of the cluster, so that Ray shows it by name.

Ray kills an actor's children immediately with the actor, but not their children. So the member's guard is not a child
(`setsid --fork`): it notices that the connection to the driver's hub is closed, and has time to end everything.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import TYPE_CHECKING

from areal_core.launchers import describe_exit
from areal_core.processes import kill_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OUTPUT_BYTES = 2000
"""Bytes of the end of a member's output that its outcome contains."""
SET_BY_RAY = ("RAY_", "__RAY", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Prefixes of environment variables that Ray sets and that members do not inherit."""


class Member:
    """Starts one member of the run. Its methods run in threads of one process."""

    process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the member and wait until it exits. Return how it ended, with the end of its unlogged output.

        Args:
            command: program and arguments.
            environment: environment variables in addition to the node's own.
            folder: working directory.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_RAY)}
        # `env` reports a missing program or folder on standard error.
        full_command = ["setsid", "--fork", "--wait", "env", "-C", folder, *command]
        with tempfile.TemporaryFile() as file:
            self.process = subprocess.Popen(
                full_command, env={**inherited, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            outcome = describe_exit(self.process.wait())
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return f"{outcome} {file.read().decode(errors='replace')}".strip()

    def end(self) -> None:
        """Kill the member, its guard and everything that they have started, and wait until they are gone."""
        if self.process is not None and self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()
