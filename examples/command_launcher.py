"""A launcher in one file: a command that reaches a host, such as ssh, starts each process of a run there.

    launcher:
      type: command_launcher.py:CommandLauncher
      hosts: {a100-1: 8, a100-2: 8}                 # hosts, and how many GPUs each has for the run
      host: 10.0.0.5                                # this machine, as the hosts reach it
      command: [ssh, -o, BatchMode=yes, "{host}"]   # what is left out is this

The words behind the command are quoted for one shell, as ssh has it. All hosts see the run folder, and have the same
Python at the same place. Nothing here watches the processes: they tell the driver's hub, and end when it hangs up.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.launchers import Node, describe_exit, member_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers import Place, ProcessGroup

SSH = ("ssh", "-o", "BatchMode=yes", "{host}")


class CommandLauncher:
    """A `Launcher` for hosts that a command reaches.

    Args:
        hosts: that are nodes of the run, each with its number of GPUs.
        host: address of this machine, as the hosts reach it.
        command: words that run a shell command on a host; {host} stands for its name.
        settings: that the core reads, such as `trainer_processes`.
    """

    def __init__(self, *, hosts: dict[str, int], host: str, command: Sequence[str] = SSH, **settings: Any) -> None:
        self.host = host
        self._hosts, self._command = hosts, command
        self._groups: list[Reached] = []

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`."""
        return [Node(name, name, gpus) for name, gpus in self._hosts.items()]

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> Reached:
        """See `Launcher.start`. Variables travel through standard input: a command line is seen by everybody."""
        reached = Reached([])
        self._groups.append(reached)
        for index, place in places.items():
            variables = {**environment, **group.environment, **member_environment(group, {index: place})}
            exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            words = [word.replace("{host}", place.node.partition("#")[0]) for word in self._command]
            script = f'cd {shlex.quote(os.getcwd())}; IFS= read -r line; eval "export $line"; exec '  # noqa: PTH109
            pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, script + shlex.join(group.command), stderr=asyncio.subprocess.STDOUT, **pipes
                )
            except OSError as error:
                raise RunError(f"{words[0]} cannot be started: {error.strerror}", hints=["launcher.command"]) from None
            assert process.stdin is not None
            process.stdin.write(f"{exports}\n".encode())
            reached.processes.append(process)
        return reached

    async def close(self) -> None:
        """See `Launcher.close`."""
        await asyncio.gather(*(group.end() for group in self._groups))


class Reached:
    """A `RunningGroup`: the commands that hold its members."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self.processes = processes

    async def wait(self) -> str:
        """See `RunningGroup.wait`: in the words of the command, such as `Permission denied`."""
        said = [(await process.communicate())[0] for process in self.processes]
        ends = zip(self.processes, said, strict=True)
        return "; ".join(
            f"its command {describe_exit(p.returncode)}: {words[-1000:].decode(errors='replace').strip()}"
            for p, words in ends
        )

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        for process in self.processes:
            try:
                await asyncio.wait_for(process.wait(), 1.0)
            except TimeoutError:
                process.kill()
