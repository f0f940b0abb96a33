"""Wardens on the nodes of an allocation: one `srun` step a node.

What SLURM says of a step is taken for less than what wardens say of themselves: `srun` ends with 0 when its node is
lost, and it lasts for minutes after a node that is cut off. So a step that has ended, however, is a node that is gone;
and where a step cannot be ended, its warden's lease is waited for, within which it ends everything by itself.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from areal_core.cli.output import complain
from areal_core.errors import RunError
from areal_core.interfaces.launcher import NODE_VARIABLE, describe_exit
from areal_slurm.allocation import expand, lost_nodes, own_address, own_job, read_nodes
from areal_slurm.commands import slurm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_slurm.allocation import Node
    from areal_slurm.config import SlurmSettings

GRACE_S = 10.0
"""For a warden that was let go of to end its processes and itself."""
CANCEL_S = 20.0
"""For SLURM to end a step."""
FORGET_S = 90.0
"""After which a warden that cannot be reached has ended everything, counted from when it was let go of."""
ASK_EVERY_S = 5.0
POLL_S = 0.05
WORDS_BYTES = 2000
STEP = """\
trap : TERM USR1  # a notice is for the warden
set -e
{setup}
set +e
"$@"
code=$?
trap - TERM
[ $code = 3 ] && [ -n "$AREAL_SLURM_REQUEUE" ] || exit $code
# The supervisor is gone. Where its node is lost, which a job with --no-kill outlives, nobody but this node gives the
# allocation back and begins again.
lost() {{
    case "$(scontrol show node -o {batch_host})" in *State=DOWN*) return 0;; esac
    names="$(scontrol show hostnames "$(squeue -h -j {job} -t RUNNING -o %N | paste -sd,)")"
    [ -n "$names" ] && ! grep -qx {batch_host} <<< "$names"  # back already, and no longer the job's
}}
for try in $(seq 120); do
    lost && echo "the node of the supervisor, {batch_host}, is lost: the job begins again" &&
        exec scontrol requeue {job}
    sleep 10
done
"""
"""On each node around its warden, whose exit code 3 says that its supervisor is gone or silent without a word."""


@dataclass
class Step:
    """What brings a warden to a node: a `srun`, and the file with what it writes."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def words(self) -> str:
        """The end of what was written."""
        with open(self.output.fileno(), "rb", closefd=False) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - WORDS_BYTES))
            return file.read().decode(errors="replace").strip()

    def describe(self) -> str:
        """How it has ended."""
        code = self.process.returncode
        how = f"its step {describe_exit(code)}"
        if not code:
            how += ", as it does when SLURM gives up the node or somebody cancels the step"
        return f"{how}: {self.words}" if self.words else how


class SlurmLauncher:
    """A `Launcher` for the nodes of the allocation that this program is inside of.

    Args:
        settings: see `SlurmSettings`.

    Raises:
        UsageError: there is no allocation.
        RunError: SLURM does not answer.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._job = own_job()
        self.host = settings.host or own_address(read_nodes(self._job))
        self._steps: dict[str, Step] = {}
        self._lost: dict[str, str] = {}

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`: every node of the allocation that is not excluded and not known to be lost."""
        excluded = set(expand(",".join(self._settings.exclude)))
        nodes = [node for node in read_nodes(self._job) if node.name not in excluded]
        if not nodes:
            raise RunError(
                f"the job {self._job} has no node for the run; left out: {', '.join(sorted(excluded)) or 'none'}",
                hints=["shorten launcher.exclude, or ask for more nodes"],
            )
        self._lost = lost_nodes([node.name for node in nodes])
        # The variables of SLURM say what this process was given, and srun would take them for what a step is to have.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLURMD_"))}
        if "SLURM_CONF" in os.environ:
            inherited["SLURM_CONF"] = os.environ["SLURM_CONF"]
        inherited.pop("CUDA_VISIBLE_DEVICES", None)  # of this node; each step is told its own
        for node in nodes:
            if node.name not in self._lost:
                output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the step
                process = subprocess.Popen(
                    self._srun(node, command),
                    env={**inherited, **environment, NODE_VARIABLE: node.name},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._steps[node.name] = Step(process, output)
        return len(nodes)

    def _srun(self, node: Node, command: Sequence[str]) -> list[str]:
        """The command of a step that has everything which the job has on a node."""
        settings = self._settings
        program = [*settings.wrapper, settings.python or command[0], *command[1:]]
        batch_host = os.environ.get("SLURMD_NODENAME", "localhost")
        script = STEP.format(setup=settings.setup, batch_host=batch_host, job=self._job)
        return [
            "srun",
            f"--jobid={self._job}",
            *([] if node.group is None else [f"--het-group={node.group}"]),
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node.name}",
            f"--gres={node.gpus}",
            f"--job-name={self._name(node.name)}",
            *("--mem=0", "--cpu-bind=none", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--export=ALL"),
            *("--input=none", "--unbuffered"),
            *settings.srun_options,
            *("bash", "-c", script, "areal-node", *program),
        ]

    @staticmethod
    def _name(node: str) -> str:
        return f"areal-{os.getpid()}-{node}"

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`: a step that has ended is a node that is gone, whatever its exit code."""
        ended = {name: step.describe() for name, step in self._steps.items() if step.process.poll() is not None}
        return {**self._lost, **ended}

    def close(self) -> None:
        """See `Launcher.close`: wardens end when they are let go of; those that do not are ended by SLURM."""
        steps, self._steps = self._steps, {}
        began = time.monotonic()
        for name, step in steps.items():
            if (code := step.process.poll()) is not None and code != 0:
                complain(f"the node {name}: {step.describe()}")
        if left := _wait(steps, began + GRACE_S):
            self._cancel(left)
            left = _wait(left, time.monotonic() + CANCEL_S)
        while left and time.monotonic() < began + FORGET_S:
            with suppress(RunError):  # a controller that does not answer says nothing of the nodes
                gone = lost_nodes(list(left))
                left = {name: step for name, step in left.items() if name not in gone}
            left = _wait(left, time.monotonic() + ASK_EVERY_S)
        if left:
            complain(f"SLURM does not end the steps on {', '.join(left)}; their processes have ended by themselves")
        for step in steps.values():
            step.process.kill()
            step.process.wait()
            step.output.close()

    def _cancel(self, steps: Mapping[str, Step]) -> None:
        """Have SLURM kill steps."""
        names = {self._name(name) for name in steps}
        try:
            for line in slurm("squeue", "-h", "--steps", "-o", "%i %j", "--user", str(os.getuid())).splitlines():
                step, _, name = line.partition(" ")
                if name in names:
                    slurm("scancel", "--signal=KILL", step)
        except RunError as error:
            complain(f"steps cannot be cancelled: {error}")


def _wait(steps: Mapping[str, Step], deadline: float) -> dict[str, Step]:
    """Wait for steps to end; those that have not."""
    while True:
        left = {name: step for name, step in steps.items() if step.process.poll() is None}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
