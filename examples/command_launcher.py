"""A launcher in one file: a command that reaches a host, such as ssh, brings a warden to each one.

    launcher:
      type: command_launcher.py:CommandLauncher
      hosts: [a100-1, a100-2]
      host: 10.0.0.5                                # this machine, as the hosts reach it
      command: [ssh, -o, BatchMode=yes, "{host}"]   # what is left out is this

The words behind the command are quoted for one shell, as ssh has it. All hosts see the run folder, and have the same
Python at the same place. The command ends when the warden does; its standard input is the warden's, which ends with it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.interfaces.launcher import NODE_VARIABLE, UNTIL_INPUT_ENDS, describe_exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SSH = ("ssh", "-o", "BatchMode=yes", "{host}")
LEASE_S = 75.0
"""After which a warden that cannot be reached has ended everything by itself, counted from when it was let go of."""
POLL_S = 0.05
LAST_WORDS = 1000


class Reached:
    """A command that holds a warden on a host, and what it has written."""

    def __init__(self, command: Sequence[str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def reason(self) -> str:
        """How it has ended; empty while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        self._output.seek(0)
        words = self._output.read()[-LAST_WORDS:].decode(errors="replace").strip()
        return f"its command {describe_exit(code)}{words and f': {words}'}"

    def tell(self, line: str) -> None:
        """Write a line to it; one that has ended hears nothing, and `reason` says why."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def end(self, deadline: float) -> None:
        """Let the warden go, and wait for it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # of what `tell` could not write
            self.process.stdin.close()
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.process.kill()
        self.process.wait()
        self._output.close()


class CommandLauncher:
    """A `Launcher` for hosts that a command reaches.

    Args:
        hosts: that are nodes of the run; the same one may be named several times.
        host: address of this machine, as the hosts reach it.
        command: words that run a shell command on a host; {host} stands for its name.
        settings: that the core reads, such as `trainer_processes`.
    """

    def __init__(self, *, hosts: list[str], host: str, command: Sequence[str] = SSH, **settings: Any) -> None:
        self.host = host
        self._hosts = hosts
        self._command = command
        self._reached: dict[str, Reached] = {}

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`. Variables travel through standard input: a command line is seen by everybody."""
        for number, host in enumerate(self._hosts):
            name = host if self._hosts.count(host) == 1 else f"{host}-{number}"
            words = [word.replace("{host}", host) for word in self._command]
            variables = {**environment, NODE_VARIABLE: name}
            exports = " ".join(f"{variable}={shlex.quote(value)}" for variable, value in variables.items())
            # `read` takes one line and leaves the rest of the input to the warden.
            script = f'cd {shlex.quote(os.getcwd())}; IFS= read -r line; eval "export $line"; exec '  # noqa: PTH109
            try:
                reached = self._reached[name] = Reached([*words, script + shlex.join([*command, UNTIL_INPUT_ENDS])])
            except OSError as error:
                raise RunError(f"{words[0]} cannot be started: {error.strerror}", hints=["launcher.command"]) from None
            reached.tell(exports)
        return len(self._hosts)

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        return {name: reached.reason for name, reached in self._reached.items() if reached.reason}

    def close(self) -> None:
        """See `Launcher.close`: a warden ends with its input, and one that is not heard of with its lease."""
        deadline = time.monotonic() + LEASE_S
        while self._reached:
            self._reached.popitem()[1].end(deadline)
