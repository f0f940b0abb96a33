"""On a node of the cluster: an actor for each member of the run, so that Ray shows them by name.

Ray kills an actor's children with it, at once and only those. So the member's guard is no child (`setsid --fork`): it
sees that the driver's hub is gone, and has the time to end everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.interfaces.launcher import describe_exit
from areal_core.launchers.guard import kill_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORDS_BYTES = 2000
SET_BY_RAY = ("RAY_", "__RAY", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")


class Member:
    """Starts a member of the run beside itself; its methods run in threads of one process."""

    pid = 0

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the member and wait until it has ended; how, with the end of what it wrote into no log.

        Args:
            command: the program first.
            environment: added to the node's own, without what Ray sets in it.
            folder: for it to work in, where the node has it.
        """
        with suppress(OSError):  # Ray gives its workers less of a share; only root may take it back
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with suppress(OSError):
            os.chdir(folder)
        if shutil.which(command[0]) is None:
            return f"there is no program {command[0]} on it: areal must be installed at the same place on all nodes"
        own = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_RAY)}
        with tempfile.TemporaryFile() as file:
            words = ["setsid", "--fork", "--wait", *command]
            process = subprocess.Popen(
                words, env={**own, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            self.pid = process.pid
            how = describe_exit(process.wait())
            self.pid = 0
            file.seek(max(0, file.seek(0, os.SEEK_END) - WORDS_BYTES))
            return f"{how} {file.read().decode(errors='replace')}".strip()

    def end(self) -> None:
        """Kill the member, its guard and everything that they have started."""
        if self.pid:
            kill_tree(self.pid)
