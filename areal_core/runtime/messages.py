"""Messages between the driver and the processes of a run, and between the driver and commands such as `areal status`.

    member -> hub       Join  Heartbeat  Announce  Lookup  Watch  Finished  ProcessFailed  Signaled
                        LogLine  RolloutStatus  StepMetrics  RestartMember  ColocatedTraining
    hub -> member       Joined  HeartbeatAck  RoleMembers  Stop  Forward
                        Announce (reply to Lookup)  Done (reply to ColocatedTraining)
    guard -> hub        ExitReport
    node <-> hub        NodeReady  StartMembers  EndMembers  MembersEnded
    command -> driver   StatusRequest  StopRun  Forward

A message that is answered names its reply. Any request may be answered with `Failed` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.runtime.frames import Message

# From a member to the hub.


class Join(Message):
    """A member of a process group registers. The reply is `Joined`.

    Attributes:
        group: name of its group.
        index: of the member in its group, from 0.
        host: name of its node.
        pid: its process id.
        sees_run: whether it could read the run's token in the run folder. The hub refuses it otherwise.
        start: number of its start, so that a process is never taken for its successor.
    """

    group: str
    index: int
    host: str
    pid: int
    sees_run: bool
    start: int = 0


class Heartbeat(Message):
    """The process lives, once a second and at each new phase. The hub sends `HeartbeatAck` back.

    Attributes:
        phase: what the process is doing, such as `train`.
        seconds: how long it has been in the phase.
        limit_s: seconds that the phase may last before the process is considered stuck; 0 for no limit.
        silence_s: seconds without a heartbeat in this phase before the process is considered lost.
    """

    phase: str
    seconds: float
    limit_s: float
    silence_s: float


class Announce(Message):
    """This member serves something at an address until it ends. With its first announcement the member is ready.

    Attributes:
        name: of the service, such as `controller`, or a role such as `server`.
        address: of the service; empty for a member that is ready and serves nothing.
    """

    name: str
    address: str


class Lookup(Message):
    """Find the address of something that a member serves. The reply is its `Announce`, as soon as there is one."""

    name: str


class Watch(Message):
    """Send this member `RoleMembers` for a role: now, and whenever they change."""

    role: str


class ProcessFailed(Message):
    """The process is about to end with an error.

    Attributes:
        text: the error's message.
        hints: what the user can do about it.
        exit_code: exit code for `areal run`.
        traceback: of the error; empty for an error that areal raises on purpose, whose message is enough.
        is_consequence: whether the process has only lost a peer, whose own error is the cause.
        is_loss: whether the error is a `LostError`.
    """

    text: str
    hints: tuple[str, ...]
    exit_code: int
    traceback: str
    is_consequence: bool = False
    is_loss: bool = False


class Finished(Message):
    """The process has done all its work and is about to end."""


class Signaled(Message):
    """The process has received a signal that would end it, because its machine is about to be taken away."""

    number: int


class RolloutStatus(Message):
    """How far the rollouts are, as a text for the terminal."""

    text: str


class LogLine(Message):
    """A line for the terminal and the log of the run."""

    text: str


class StepMetrics(Message):
    """The metrics of a finished step."""

    line: Mapping[str, Any]


class RestartMember(Message):
    """Kill and restart a member, such as a server that fails its health checks.

    Attributes:
        name: name of the member.
        why: the reason, as the end of a sentence: "did not free its GPU memory".
    """

    name: str
    why: str


class ColocatedTraining(Message):
    """The trainer starts to compute on GPUs that it shares with servers, or has stopped.

    While it computes, the driver starts no server on these GPUs. The reply to the start is `Done`, when no server is
    being started any more.

    Attributes:
        is_active: whether the trainer computes from now on.
    """

    is_active: bool


# From the hub to a member.


class Joined(Message):
    """The member is accepted.

    Attributes:
        environment: variables that it adds to its own.
    """

    environment: Mapping[str, str]


class HeartbeatAck(Message):
    """The hub lives."""


class Stop(Message):
    """The run was asked to stop: finish in order."""


class ServingMember(Message):
    """A member that serves something.

    Attributes:
        name: name of the member.
        address: address of its service.
        is_fresh: whether it was started in this attempt. An older server still holds an older attempt's weights.
    """

    name: str
    address: str
    is_fresh: bool


class RoleMembers(Message):
    """The members of a role.

    Attributes:
        role: the role.
        serving: members that serve now.
        failed: for each member that will not be restarted again, the reason.
    """

    role: str
    serving: tuple[ServingMember, ...]
    failed: Mapping[str, str]


# From a guard to the hub.


class ExitReport(Message):
    """A member has ended, and nothing that it started is left. The reply is `Done`.

    Attributes:
        group: name of its group.
        index: of the member in its group.
        start: number of its start; see `Join`.
        code: its exit code; negative for the signal that killed it.
    """

    group: str
    index: int
    start: int
    code: int


# From a command that knows the run folder.


class StatusRequest(Message):
    """Ask the driver for the status of its run. The reply is `RunStatus`."""


class ProcessStatus(Message):
    """The status of one process. `areal status --json` documents these fields.

    Attributes:
        role: of its group.
        host: name of its node.
        pid: its process id; 0 before it has joined.
        phase: its phase; see `Heartbeat`.
        silent_s: seconds since its last message.
        address: of its service; empty if it serves nothing.
        gpus: numbers of its GPUs on the node.
    """

    role: str
    host: str
    pid: int
    phase: str
    silent_s: float
    address: str
    gpus: tuple[int, ...]


class RunStatus(Message):
    """The status of a run. A reply shows that the run has a driver.

    Attributes:
        host: name of the driver's machine.
        pid: process id of the driver.
        attempt: number of the attempt.
        processes: the run's processes by name.
        is_ending: whether the driver is ending all processes.
    """

    host: str
    pid: int
    attempt: int
    processes: Mapping[str, ProcessStatus]
    is_ending: bool = False


class StopRun(Message):
    """Stop the run. The reply is `Done`.

    Attributes:
        now: False to stop after a checkpoint, as SIGTERM does; True to stop immediately, as a second Ctrl-C does.
    """

    now: bool


class Forward(Message):
    """Send a request to a role of the run. The reply is `Forwarded`.

    Attributes:
        role: the role, such as `controller`.
        request: the frame of the request.
    """

    role: str
    request: bytes


class Forwarded(Message):
    """The reply of a role.

    Attributes:
        reply: its frame.
    """

    reply: bytes
