"""On a node of the cluster: an actor for each member of the run, so that Ray shows them by name.

Ray kills an actor's children with it, at once and only those. So the member's guard is no child (`setsid --fork`): it
sees that the driver's hub is gone, and has the time to end everything.
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

WORDS_BYTES = 2000
SET_BY_RAY = ("RAY_", "__RAY", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")


class Member:
    """Starts a member of the run beside itself; its methods run in threads of one process."""

    process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the member and wait until it has ended; how, with the end of what it wrote into no log.

        Args:
            command: the program first.
            environment: added to the node's own, without what Ray sets in it.
            folder: for it to work in.
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_RAY)}
        words = ["setsid", "--fork", "--wait", "env", "-C", folder, *command]  # `env` says what it cannot find
        with tempfile.TemporaryFile() as file:
            self.process = subprocess.Popen(
                words, env={**own, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            how = describe_exit(self.process.wait())
            file.seek(max(0, file.seek(0, os.SEEK_END) - WORDS_BYTES))
            return f"{how} {file.read().decode(errors='replace')}".strip()

    def end(self) -> None:
        """Kill the member, its guard and everything that they have started; returns when they are gone."""
        if self.process is not None and self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()
