"""All processes of a run on this machine, which is one node, or plays several."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.interfaces.launcher import NODE_VARIABLE, describe_exit
from areal_core.launchers.node import count_gpus, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers.settings import LocalSettings

GRACE_S = 10.0


class LocalLauncher:
    """Brings wardens as children in sessions of their own: a terminal's Ctrl-C reaches only the supervisor."""

    host = "127.0.0.1"

    def __init__(self, settings: LocalSettings) -> None:
        self._count = settings.nodes
        self._wardens: dict[str, subprocess.Popen[bytes]] = {}

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`."""
        for number in range(self._count):
            name = f"node-{number}" if self._count > 1 else "this machine"
            own = {**os.environ, **environment, **(self._own(number, name) if self._count > 1 else {})}
            self._wardens[name] = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
        return self._count

    def _own(self, number: int, name: str) -> dict[str, str]:
        """What makes a part of this machine a node: a name, and its share of the GPUs."""
        gpus = visible_gpus() or list(map(str, range(count_gpus())))
        share = len(gpus) // self._count
        return {NODE_VARIABLE: name, "CUDA_VISIBLE_DEVICES": ",".join(gpus[number * share : (number + 1) * share])}

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        codes = {name: warden.poll() for name, warden in self._wardens.items()}
        return {name: f"its warden {describe_exit(code)}" for name, code in codes.items() if code is not None}

    def close(self) -> None:
        """See `Launcher.close`: a warden ends by itself when the supervisor lets go of it."""
        deadline = time.monotonic() + GRACE_S
        for warden in self._wardens.values():
            while warden.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            with suppress(ProcessLookupError):
                warden.kill()
            warden.wait()
