"""Between the supervisor of a run, the wardens of its nodes, and the processes that they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from areal_core.messages.codec import message

# From the supervisor to a warden.


@message
class StartProcess:
    """Start a process.

    Attributes:
        name: unique among the processes of the run.
        command: of the operating system, the program first.
        environment: added to the warden's own.
        log: file for what it writes, bounded.
        gpus: that it sees, as the node counts them; None leaves all of them.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: str
    gpus: tuple[int, ...] | None


@message
class SignalProcess:
    """Send a signal to a process (and not to what it started)."""

    name: str
    number: int


@message
class EndProcess:
    """End a process and everything that it started: SIGTERM, and SIGKILL after `grace_s`; at once where that is 0."""

    name: str
    grace_s: float


@message
class FindPort:
    """A port of the node on which nobody listens: answered with `Port`."""


@message
class TryFolder:
    """Is this the run's folder? Answered with `Done` once the node has read `word` there and written a file of its own.

    Attributes:
        folder: of the check.
        word: that the supervisor has written into its file `supervisor`.
        answer: name of the file that the node writes, with the same word.
    """

    folder: str
    word: str
    answer: str


@message
class Leave:
    """The run needs this node no more: end everything. Answered with `NodeLeft`."""


@message
class Beat:
    """The supervisor lives; so does the lease of its wardens.

    Attributes:
        every_s: seconds between the warden's own beats.
    """

    every_s: float = 1.0


# From a warden to the supervisor.


@message
class NodeReady:
    """A warden has come.

    Attributes:
        name: of the node, unlike any other's: its host's, unless the launcher says otherwise.
        host: name of the machine.
        address: under which other nodes reach it.
        interface: of its network that has this address; empty where none was found.
        cores, memory_bytes: that it has.
        gpus: how many it has for the run.
        scratch: a folder of its own for sockets and published weights, in memory where possible.
        pid: of the warden.
        python: with which it runs, and with it all programs of areal's own on this node.
        has_joined: whether it came by itself, so that no launcher can end it.
    """

    name: str
    host: str
    address: str
    interface: str
    cores: int
    memory_bytes: int
    gpus: int
    scratch: str
    pid: int
    python: str
    has_joined: bool = False


@message
class Port:
    """Nobody listened on it a moment ago."""

    number: int


@message
class NodeBeat:
    """The node lives.

    Attributes:
        stopped: names of processes that somebody has stopped (SIGSTOP, a debugger) and that do not go on.
    """

    stopped: tuple[str, ...] = ()


@message
class NodeLeft:
    """Nothing of the run is left on the node, which was told to leave."""


@message
class NodeNotice:
    """The node is about to be taken away: its warden was sent a signal."""

    number: int


@message
class ProcessEnded:
    """A process has ended, and with it everything that it started.

    Attributes:
        name: of the process.
        code: exit code; negative for the signal that killed it.
        last_words: the end of what it wrote.
    """

    name: str
    code: int
    last_words: str


# From a process to its supervisor, over its link.


@message
class Alive:
    """The process lives.

    Attributes:
        phase: what it is doing.
        seconds: for how long it has been doing this.
        deadline_s: for how long it may; 0 where something else has an eye on that.
    """

    phase: str
    seconds: float
    deadline_s: float = 0.0


@message
class Dying:
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


@message
class Finished:
    """The process has done all its work, and ends with this exit code."""

    code: int


@message
class Announce:
    """Something that others ask for by name, such as an address."""

    name: str
    value: str


@message
class Ask:
    """The value that is announced under this name, as soon as it is: answered with `Announce`."""

    name: str


@message
class Status:
    """How a role is now, for the live view; `fields` are numbers and texts."""

    fields: Mapping[str, Any]


@message
class Notice:
    """A line that whoever watches the run should read."""

    text: str


@message
class StepMetrics:
    """A line of metrics has been written."""

    line: Mapping[str, Any]


@message
class RunProcess:
    """Start a process for the one that asks, which is told of its end with `ProcessEnded`.

    Answered with `Done`, or `Failed` where there is no room for it.

    Attributes:
        name, command, environment: see `StartProcess`.
        role: what it is for.
        gpus: that it sees, counted through all nodes; None leaves all of its node's.
        cores: that it computes with.
        node, beside, port, speaks: see `ProcessSpecification`.
    """

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    gpus: tuple[int, ...] | None
    cores: int
    node: str
    beside: str
    port: int
    speaks: bool


@message
class FindPlace:
    """A node for a process that listens: answered with `Found`, or `Failed`.

    Attributes:
        gpus, spare: see `Needs`.
    """

    gpus: tuple[int, ...] | None
    spare: int | None


@message
class Adopt:
    """Where is a process that still runs, started for a former process of the asker's name? Answered with `Found`."""

    name: str


@message
class Found:
    """Where a process can listen, or does; see `Place`. All empty where there is none."""

    node: str
    address: str
    port: int
    gpus: tuple[int, ...] | None = None


# From somebody outside, who knows the run's folder.


@message
class WhoOwns:
    """Whose run is this? Answered with `Owner`."""


@message
class Owner:
    """The supervisor's answer: it lives.

    Attributes:
        host, pid: of the supervisor.
        epoch: of the run.
        phases: what each process is doing.
        nodes: on which each of them runs.
        gpus: how many each node has, by its name; also of nodes on which nothing runs.
        silent: seconds since each of them was heard; of those that do not speak, since it was stopped.
        silent_nodes: seconds since each node was heard.
        is_ending: whether it lets go of all nodes, and takes none.
        awaited: nodes for which it then waits, each with the seconds after which nothing runs there any more.
    """

    host: str
    pid: int
    epoch: int
    phases: Mapping[str, str]
    nodes: Mapping[str, str]
    gpus: Mapping[str, int]
    silent: Mapping[str, float] = field(default_factory=dict)
    silent_nodes: Mapping[str, float] = field(default_factory=dict)
    is_ending: bool = False
    awaited: Mapping[str, float] = field(default_factory=dict)


@message
class StopRun:
    """Stop after a checkpoint, as SIGTERM asks; `now`: at once, as a second Ctrl-C does. Answered with `Done`."""

    now: bool


@message
class Forward:
    """A request for a role of the run; answered with its `Forwarded` reply.

    Attributes:
        role: `controller`.
        request: a frame.
    """

    role: str
    request: bytes


@message
class Forwarded:
    """The frame that a role answered with."""

    reply: bytes


@message
class Done:
    """The reply to a request that has no other answer than that it was done."""
