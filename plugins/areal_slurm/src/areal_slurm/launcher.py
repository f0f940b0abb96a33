"""Launcher for the nodes of a SLURM allocation: a group is a step of `srun`, with one task for each member.

SLURM starts and kills members, but does not report their state: if a node is lost, `srun` ends with 0, and minutes
later. Members send heartbeats to the driver's hub, and exit when it closes the connection.
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

GRACE_S = 0.5
"""Seconds for `srun` to kill its step after SIGTERM. It may then wait for lost nodes, so it is killed."""
OUTPUT_BYTES = 2000
"""Bytes of the end of srun's output that an outcome contains."""
SRUN = (
    *("srun", "--overlap", "--overcommit", "--distribution=arbitrary", "--mem=0", "--cpu-bind=none", "--export=ALL"),
    *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--unbuffered"),
)
"""Command of a step that shares all resources of the job, and whose tasks end independently."""


class SlurmLauncher:
    """A `Launcher` for the nodes of the allocation in which this program runs.

    Args:
        settings: settings of the launcher.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._shares: dict[str, Share] = {}
        self._groups: list[SlurmGroup] = []

    @cached_property
    def host(self) -> str:
        """Address of this node for the others; see `Launcher`. Read late: a dry run needs no allocation.

        Raises:
            UsageError: there is no allocation.
            RunError: SLURM does not answer.
        """
        return self._settings.host or own_address([*read_job(own_job())[1]])

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """Return the allocation's nodes that are neither excluded nor lost, this one first; see `Launcher.nodes`.

        Raises:
            RunError: there is no such node, or SLURM does not answer.
        """
        del groups  # an allocation cannot grow
        _, self._shares = await asyncio.to_thread(read_job, own_job())
        excluded = dict.fromkeys(expand(",".join(self._settings.exclude)), "excluded")
        states = await asyncio.to_thread(read_nodes, [name for name in self._shares if name not in excluded])
        # SLURM takes minutes to notice a lost node, and a step that includes one does not start at all.
        answers = await asyncio.gather(*(asyncio.to_thread(reach, node) for node in states.values()))
        for (name, node), answer in zip(states.items(), answers, strict=True):
            if node.is_lost or not answer:
                excluded[name] = f"{node.state}{'' if answer else ', does not answer'}"
        here = os.environ.get("SLURMD_NODENAME")
        nodes = [
            Node(name, states[name].address, share.gpus)
            for name, share in sorted(self._shares.items(), key=lambda item: item[0] != here)
            if name not in excluded
        ]
        if not nodes:
            reasons = ", ".join(f"{name} ({reason})" for name, reason in excluded.items()) or "none"
            hints = ["shorten launcher.exclude, or request more nodes"]
            raise RunError(f"the job {own_job()} has no node for the run; excluded: {reasons}", hints=hints)
        return nodes

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> SlurmGroup:
        """Start one step, or one for each kind of node if the job's shares differ; see `Launcher.start`."""
        by_share: dict[Share, dict[int, Place]] = {}
        for index, place in places.items():
            share = self._shares.get(place.node, Share())  # the node may be lost by now: then `srun` fails
            by_share.setdefault(share, {})[index] = place
        # `srun` would take SLURM's variables of this process as options of the step, and CUDA_VISIBLE_DEVICES has the
        # GPUs of this node: SLURM sets it for each step.
        hidden = "SLURM_", "SLURMD_", "CUDA_VISIBLE_DEVICES"
        variables = {
            name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(hidden)
        }
        variables |= {**environment, **group.environment}
        running = SlurmGroup(group.name)
        self._groups.append(running)
        for share, members in by_share.items():
            await running.step(self._srun(group, share, members), {**variables, **member_environment(group, members)})
        return running

    def _srun(self, group: ProcessGroup, share: Share, places: Mapping[int, Place]) -> list[str]:
        """Return the command of a step."""
        settings, program = self._settings, [*group.command]
        if settings.python and program[0] == sys.executable:
            program[0] = settings.python
        return [
            *SRUN,
            f"--jobid={own_job()}",
            *([f"--het-group={share.component}"] if share.component else []),
            f"--job-name={group.name}",
            f"--ntasks={len(places)}",
            f"--nodelist={','.join(place.node for place in places.values())}",  # the node of each task, in order
            f"--gres={share.gres}",
            *settings.srun_options,
            *(["bash", "-c", f'set -e\n{settings.setup}\nset +e\nexec "$@"', group.name] if settings.setup else []),
            *settings.wrapper,
            *program,
        ]

    async def close(self) -> None:
        """End all groups; see `Launcher.close`."""
        await asyncio.gather(*(group.end() for group in self._groups))
        self._groups.clear()


class SlurmGroup:
    """The steps of a group; see `RunningGroup`.

    Args:
        name: name of the group.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: dict[asyncio.subprocess.Process, asyncio.Task[str]] = {}

    async def step(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a step with some of the members.

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
        """Wait until all steps have ended; return how. See `RunningGroup.wait`."""
        return "\n".join([await asyncio.shield(outcome) for outcome in self._steps.values()])

    async def end(self) -> None:
        """Kill the steps; see `RunningGroup.end`."""
        for signal_number, timeout_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            for process in self._steps:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal_number)  # `Process.send_signal` may consume the exit code
            if self._steps:
                await asyncio.wait(self._steps.values(), timeout=timeout_s)


async def _watch(process: asyncio.subprocess.Process, output: IO[bytes]) -> str:
    """Wait until `srun` ends; return how, with the end of its output."""
    code = await process.wait()
    with output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        text = output.read().decode(errors="replace").strip()
    return f"srun {describe_exit(code)}: {text}"
