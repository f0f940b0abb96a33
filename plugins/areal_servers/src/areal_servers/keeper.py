"""Keeps one server process: `python -m areal_servers.keeper COMMAND...`.

The server and all that it starts end when this process's standard input does, which happens however the run ends: the
kernel closes a pipe even behind a process that was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GRACE_S = 5.0


def main(command: Sequence[str]) -> int:
    """Run the command in a process group of its own until it ends or standard input does; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127

    def end() -> None:
        while os.read(0, 1):
            pass
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    code = process.wait()
    _signal_group(process.pid, signal.SIGKILL)  # what it left behind
    return code if code >= 0 else 128 - code


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    # Without Python's own end, which would wait for the thread that reads.
    os._exit(main(sys.argv[1:]))
