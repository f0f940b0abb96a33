"""Members on the nodes of an allocation: a group is a step of `srun`, one task for each member.

SLURM starts and kills, and is not asked how anything is: `srun` ends with 0 where a node is lost, and minutes late.
Members tell the driver's hub that they live, and end by themselves when it hangs up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress
from functools import cached_property
from typing import IO, TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.launchers import Node, describe_exit, member_environment
from areal_core.processes import start_task
from areal_slurm.allocation import Share, expand, own_address, own_job, reach, read_job, read_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers import Place, ProcessGroup
    from areal_slurm.config import SlurmSettings

PATIENCE_S = 0.5
"""For `srun`, which kills its step when it is asked to end, and then waits for nodes that are lost."""
WORDS_BYTES = 2000
SRUN = (
    *("srun", "--overlap", "--overcommit", "--distribution=arbitrary", "--mem=0", "--cpu-bind=none", "--export=ALL"),
    *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--unbuffered"),
)
"""Of a step that shares all that the job has, and whose members end one by one."""


class SlurmLauncher:
    """A `Launcher` for the nodes of the allocation that this program is inside of.

    Args:
        settings: see `SlurmSettings`.

    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._shares: dict[str, Share] = {}
        self._groups: list[SlurmGroup] = []

    @cached_property
    def host(self) -> str:
        """See `Launcher`. A launcher that only tells what it would do needs no allocation.

        Raises:
            UsageError: there is no allocation.
            RunError: SLURM does not answer.
        """
        return self._settings.host or own_address([*read_job(own_job())[1]])

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: those of the allocation that are neither excluded nor lost, this one first."""
        del groups  # an allocation has what it has
        _, self._shares = await asyncio.to_thread(read_job, own_job())
        left_out = dict.fromkeys(expand(",".join(self._settings.exclude)), "excluded")
        known = await asyncio.to_thread(read_nodes, [name for name in self._shares if name not in left_out])
        # SLURM takes minutes to notice that a node is gone; a step that includes one does not start at all.
        answers = await asyncio.gather(*(asyncio.to_thread(reach, node) for node in known.values()))
        for (name, node), answer in zip(known.items(), answers, strict=True):
            if node.is_lost or not answer:
                left_out[name] = f"{node.state}{'' if answer else ', does not answer'}"
        here = os.environ.get("SLURMD_NODENAME")
        found = [
            Node(name, known[name].address, share.gpus)
            for name, share in sorted(self._shares.items(), key=lambda item: item[0] != here)
            if name not in left_out
        ]
        if not found:
            why = ", ".join(f"{name} ({reason})" for name, reason in left_out.items()) or "none"
            hints = ["shorten launcher.exclude, or ask for more nodes"]
            raise RunError(f"the job {own_job()} has no node for the run; left out: {why}", hints=hints)
        return found

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> SlurmGroup:
        """See `Launcher.start`: one step; where nodes differ in what the job has there, one for those that do not."""
        alike: dict[Share, dict[int, Place]] = {}
        for index, place in places.items():
            share = self._shares.get(place.node, Share())  # a lost one: `srun` says so
            alike.setdefault(share, {})[index] = place
        # The variables of SLURM say what this process was given, and srun would take them for what a step is to have;
        # GPUs are those of this node, and each step is told its own.
        away = "SLURM_", "SLURMD_", "CUDA_VISIBLE_DEVICES"
        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(away)}
        kept |= {**environment, **group.environment}
        running = SlurmGroup(group.name)
        self._groups.append(running)
        for share, some in alike.items():
            await running.step(self._srun(group, share, some), {**kept, **member_environment(group, some)})
        return running

    def _srun(self, group: ProcessGroup, share: Share, places: Mapping[int, Place]) -> list[str]:
        """The command of a step."""
        settings, program = self._settings, [*group.command]
        if settings.python and program[0] == sys.executable:
            program[0] = settings.python
        return [
            *SRUN,
            f"--jobid={own_job()}",
            *([f"--het-group={share.component}"] if share.component else []),
            f"--job-name={group.name}",
            f"--ntasks={len(places)}",
            f"--nodelist={','.join(place.node for place in places.values())}",  # of each task, in their order
            f"--gres={share.gres}",
            *settings.srun_options,
            *(["bash", "-c", f'set -e\n{settings.setup}\nset +e\nexec "$@"', group.name] if settings.setup else []),
            *settings.wrapper,
            *program,
        ]

    async def close(self) -> None:
        """See `Launcher.close`."""
        await asyncio.gather(*(group.end() for group in self._groups))
        self._groups.clear()


class SlurmGroup:
    """See `RunningGroup`.

    Args:
        name: of the group.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: dict[asyncio.subprocess.Process, asyncio.Task[str]] = {}

    async def step(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start some of the members.

        Raises:
            RunError: `srun` cannot be started.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the step
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            output.close()
            raise RunError(f"{command[0]} cannot be started: {error}") from error
        self._steps[process] = start_task(_watch(process, output), f"step of {self._name}")

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        return "\n".join([await asyncio.shield(words) for words in self._steps.values()])

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, None)):
            for process in self._steps:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, number)  # `Process.send_signal` may take the exit code away
            if self._steps:
                await asyncio.wait(self._steps.values(), timeout=patience_s)


async def _watch(process: asyncio.subprocess.Process, output: IO[bytes]) -> str:
    """How `srun` has ended, with the end of what it wrote."""
    code = await process.wait()
    with output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - WORDS_BYTES))
        words = output.read().decode(errors="replace").strip()
    return f"srun {describe_exit(code)}: {words}"
