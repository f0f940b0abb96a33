"""All processes of a run on this machine, which is one node."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.interfaces.launcher import describe_exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers.settings import LocalSettings

GRACE_S = 10.0


class LocalLauncher:
    """Brings one warden, as a child in a session of its own: a terminal's Ctrl-C reaches only the supervisor."""

    host = "127.0.0.1"

    def __init__(self, settings: LocalSettings) -> None:
        self.trainer_processes = settings.trainer_processes
        self.threads_per_process = settings.threads_per_process
        self._warden: subprocess.Popen[bytes] | None = None

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`."""
        self._warden = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return 1

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        code = self._warden.poll() if self._warden is not None else None
        return {} if code is None else {"this machine": f"its warden {describe_exit(code)}"}

    def close(self) -> None:
        """See `Launcher.close`: a warden ends by itself when the supervisor lets go of it."""
        if self._warden is None:
            return
        deadline = time.monotonic() + GRACE_S
        while self._warden.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            self._warden.kill()
        self._warden.wait()
