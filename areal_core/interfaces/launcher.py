"""The processes of a run: groups of them, where each stands, and what a launcher does to start them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class EndMeans(StrEnum):
    """What the end of a member means for its run."""

    ENDS_ATTEMPT = "ends the attempt"
    REPLACED = "replaced"
    """It is started again, by itself."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Processes of a run that are started together and run the same command.

    Attributes:
        name: unique in the run, such as `trainer` or `server-2`. Members of a group of several are named
            `trainer-0`, `trainer-1`, ...; the output of each goes to `logs/<member>.log`.
        role: what it is for, such as `trainer` or `server`.
        command: of each member, the program first.
        count: members.
        gpus_each: GPUs of each member; all of one member stand on one node.
        gpus: the numbers of these GPUs, member by member, where a run of one machine names them; None for any.
        cores_each: CPU cores that each computes with.
        beside: name of the group on whose first member's node it must stand; empty for any node.
        end: what a member's end means.
        restarts: times within five minutes that a member that had come up is started again; None for any number.
        shares_gpus: whether it uses GPUs that another group has as well.
        environment: added to the node's own.
    """

    name: str
    role: str
    command: Sequence[str]
    count: int = 1
    gpus_each: int = 0
    gpus: tuple[int, ...] | None = None
    cores_each: int = 1
    beside: str = ""
    end: EndMeans = EndMeans.ENDS_ATTEMPT
    restarts: int | None = None
    shares_gpus: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def member(self, index: int) -> str:
        """The name of one member."""
        return self.name if self.count == 1 and self.role != "trainer" else f"{self.name}-{index}"


class Node(NamedTuple):
    """A machine on which members can be started.

    Attributes:
        name: unlike any other node's.
        address: under which other nodes reach it.
        gpus: how many of them the run may use there, numbered from 0.
    """

    name: str
    address: str
    gpus: int = 0


class Place(NamedTuple):
    """Where a member runs.

    Attributes:
        node: its name.
        gpus: that it uses, by their numbers on the node.
    """

    node: str
    gpus: tuple[int, ...] = ()


class ProcessEnd(NamedTuple):
    """How a process has ended.

    Attributes:
        code: exit code; negative for the signal that killed it; None where nobody can tell: its node is gone.
        last_words: the end of what it wrote.
    """

    code: int | None
    last_words: str = ""

    def describe(self) -> str:
        """In words, with what it wrote last."""
        how = describe_exit(self.code)
        return f"{how}; the end of its log:\n{self.last_words}" if self.last_words else how


def describe_exit(code: int | None) -> str:
    """An exit code in words: `ended with exit code 1`, `was killed by SIGKILL`."""
    import signal

    if code is None:
        return "was lost: it, its guard and its node no longer respond"
    names = {number.value: number.name for number in signal.Signals}  # of real-time signals only two have names
    return f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


class RunningGroup(Protocol):
    """Members that were started by one call of a launcher."""

    async def wait(self) -> str:
        """Until the launcher believes that all are over; in its own words how, for members that never came."""

    async def end(self) -> None:
        """End what is left and give its resources back; safe to call twice. Members end by themselves when the driver
        closes its connection to them, which it has done before: give them a second or two, then kill what was started.
        """


class Launcher(Protocol):
    """Starts the members of process groups where they were placed. It watches nothing: members tell the driver's hub.

    Its settings are derived from `areal_core.config.LauncherSettings`, where the core reads how many ranks there are.
    One to which machines come by themselves (`areal node`) has `async take_node(peer, ready, number)` as well; see
    `areal_core.launchers.external`.

    Attributes:
        host: address of this machine at which members reach the driver; may ask a cluster.
    """

    host: str

    async def nodes(self, groups: Sequence[ProcessGroup]) -> Sequence[Node]:
        """The nodes that may be used now, in the order in which they are filled.

        Args:
            groups: that are to be started there; a launcher that has to ask for room asks for theirs.

        Raises:
            RunError: there is no room; says what there is.
        """

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> RunningGroup:
        """Start members of a group and return without waiting for them.

        Every member runs `group.command` with three sets of variables added to its node's own: `environment`,
        `group.environment`, and `areal_core.launchers.member_environment(group, {index: place})`, which tell it its
        place. The working folder is this program's, where the node has it. What is started so becomes the member's
        guard: it forks the member, sends what both write to the member's log, and ends when nothing of it is left.
        Until it has joined, what it writes goes where the launcher sends it.

        A launcher that starts several members by one command, as srun does, gives each the places of all of them, in
        the order of its tasks, and each task its number in `SLURM_PROCID` or `AREAL_TASK`.

        Args:
            group: of them.
            places: by index of the member in its group.
            environment: where the driver is, and what shows that they belong to the run.

        Raises:
            RunError: they cannot be started.
        """

    async def close(self) -> None:
        """End everything that is left, and give all resources back; safe to call twice."""


@runtime_checkable
class RequestsRoom(Protocol):
    """A launcher that can ask its cluster for more, where servers beyond the minimum are to be started."""

    async def request(self, group: ProcessGroup) -> bool:
        """Ask for room for a group, unless that was done before; whether `nodes` has it by now."""
