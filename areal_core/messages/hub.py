"""Between the driver's hub and the processes of a run, each of which holds one connection to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.messages.frames import Message

# From a process to the hub.


class Join(Message):
    """A member of a process group comes. Answered with `Welcome`, or `Failed`.

    Attributes:
        group: its name.
        index: of the member in its group, from 0.
        host: name of its machine.
        pid: of the process.
        sees_run: whether it has read the run's token in the run's folder: else it is not part of the run.
    """

    group: str
    index: int
    host: str
    pid: int
    sees_run: bool


class Ended(Message):
    """The last word of a guard: its member is over, and nothing is left of it.

    Attributes:
        code: exit code; negative for the signal that killed it.
    """

    group: str
    index: int
    pid: int
    code: int


class Beat(Message):
    """The process lives; once a second. Answered with `Heard`.

    Attributes:
        phase: what it is doing.
        seconds: for how long it has been doing this.
        limit_s: for how long it may; 0 where something else has an eye on that.
        silence_s: for how long it may say nothing at all meanwhile.
    """

    phase: str
    seconds: float
    limit_s: float
    silence_s: float


class Announce(Message):
    """This member serves something at an address, until it ends."""

    name: str
    address: str


class Ask(Message):
    """The address at which something is served, as soon as it is: answered with `Announce`."""

    name: str


class Watch(Message):
    """Tell this process of all members of a role and their addresses, now and at each change, with `Servers`."""

    role: str


class Failing(Message):
    """Why the process is about to end.

    Attributes:
        text, hints: as an error of areal is told.
        exit_code: that the program shall end with.
        traceback: where it happened; empty for errors that are raised on purpose.
        is_consequence: the cause lies elsewhere: a peer was lost, and its own words say more.
        is_loss: see `LostError`.
    """

    text: str
    hints: tuple[str, ...]
    exit_code: int
    traceback: str
    is_consequence: bool = False
    is_loss: bool = False


class Finished(Message):
    """The process has done all its work, and ends."""


class Signaled(Message):
    """A signal that would end the process has come: its machine is about to be taken away."""

    number: int


class Status(Message):
    """How the rollouts are now, in words, for whoever watches the run."""

    text: str


class Notice(Message):
    """A line that whoever watches the run should read."""

    text: str


class StepMetrics(Message):
    """A line of metrics has been written."""

    line: Mapping[str, Any]


class Restart(Message):
    """A replaced member shall be ended and restarted: it does not do what it should."""

    name: str
    why: str


class TrainersTurn(Message):
    """The trainer's turn on GPUs that it shares with servers has begun, or has ended: in it none is started on them.

    Its begin is answered with `Done`, as soon as none of them is on its way.
    """

    has_begun: bool


# From the hub to a process.


class Welcome(Message):
    """The member is let in.

    Attributes:
        environment: variables that it works with.
    """

    environment: Mapping[str, str]


class Heard(Message):
    """The hub lives."""


class Stop(Message):
    """Finish in order: the run was asked to stop."""


class Server(Message):
    """A member that serves.

    Attributes:
        name: of the member.
        address: where it serves.
        is_fresh: whether it was started in this attempt, and so holds what it loaded at its start.
    """

    name: str
    address: str
    is_fresh: bool


class Servers(Message):
    """All members of a role that serve now, and those that are gone for good, each with the reason."""

    serving: tuple[Server, ...]
    failed: Mapping[str, str]


# Between the driver and the agent of a machine (`areal node`).


class NodeReady(Message):
    """A machine offers itself. Answered with `Done`, or `Failed`.

    Attributes:
        name: of the node, unlike any other's.
        address: under which other machines reach it.
        gpus: that it has.
    """

    name: str
    address: str
    gpus: int


class StartMembers(Message):
    """Start members of a group here: their command, with these variables for each."""

    group: str
    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]


class EndMembers(Message):
    """End what was started for a group, at once."""

    group: str


class MembersEnded(Message):
    """All that was started for a group is over."""

    group: str
    how: str


# From somebody outside, who knows the run's folder.


class WhoDrives(Message):
    """Whose run is this? Answered with `Driving`."""


class Process(Message):
    """One process of a run.

    Attributes:
        role: of its group.
        host, pid: of it.
        phase: what it is doing.
        silent_s: seconds since it was heard.
        address: where it serves; empty where it does not.
        gpus: that it uses.
    """

    role: str
    host: str
    pid: int
    phase: str
    silent_s: float
    address: str
    gpus: tuple[int, ...]


class Driving(Message):
    """The driver's answer: it lives.

    Attributes:
        host, pid: of the driver.
        attempt: of the run.
        processes: by name.
        is_ending: whether it ends everything.
    """

    host: str
    pid: int
    attempt: int
    processes: Mapping[str, Process]
    is_ending: bool = False


class StopRun(Message):
    """Stop after a checkpoint, as SIGTERM asks; `now`: at once, as a second Ctrl-C does. Answered with `Done`."""

    now: bool


class Forward(Message):
    """A request for a role of the run; answered with its `Forwarded` reply.

    Attributes:
        role: `controller`.
        request: a frame.
    """

    role: str
    request: bytes


class Forwarded(Message):
    """The frame that a role answered with."""

    reply: bytes
