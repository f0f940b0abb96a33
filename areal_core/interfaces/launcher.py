"""The interface of launchers, with process groups, nodes and places.

    ProcessGroup   members that run the same command, such as the ranks of the trainer
    Node           a machine on which members can be started
    Place          the node and the GPUs of one member
    Launcher       lists nodes, and starts members where the driver has placed them
    RunningGroup   what one start has started

The driver decides where members run, and its hub watches them. A launcher only starts and kills processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class OnExit(StrEnum):
    """What the driver does if a member of a process group ends before the attempt does."""

    END_ATTEMPT = "ends the attempt"
    """End the attempt. The run continues from its last checkpoint."""
    RESTART = "replaced"
    """Restart this member only."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Processes of a run that are started together and run the same command.

    Attributes:
        name: unique in the run, such as `trainer` or `server-2`. The members of a larger group are called `NAME-0`,
            `NAME-1`, ...; the output of each goes to `logs/MEMBER.log`.
        role: its purpose, such as `trainer` or `server`.
        command: the command of each member, with the program first.
        count: number of members.
        gpus_each: number of GPUs of each member. All GPUs of a member are on one node.
        gpus: numbers of these GPUs, member by member, if the config names them; None for any GPUs.
        cores_each: number of CPU cores that each member computes with.
        beside: name of a group; the members run on the node of its first member. Empty for any node.
        on_exit: what the driver does if a member ends.
        restarts: how often a member that was ready is restarted within five minutes; None for no limit.
        shares_gpus: whether another group uses the same GPUs.
        environment: variables that are added to the node's own.

    Example:
        >>> from areal_core.launchers import OnExit, ProcessGroup
        >>> command = ["python", "-m", "my_server"]
        >>> group = ProcessGroup("judge", "judge", command, count=2, gpus_each=1, on_exit=OnExit.RESTART)
        >>> [group.member(index) for index in range(group.count)]
        ['judge-0', 'judge-1']
    """

    name: str
    role: str
    command: Sequence[str]
    count: int = 1
    gpus_each: int = 0
    gpus: tuple[int, ...] | None = None
    cores_each: int = 1
    beside: str = ""
    on_exit: OnExit = OnExit.END_ATTEMPT
    restarts: int | None = None
    shares_gpus: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def member(self, index: int) -> str:
        """Return the name of one member."""
        return self.name if self.count == 1 and not self.has_ranks else f"{self.name}-{index}"

    @property
    def has_ranks(self) -> bool:
        """Whether its members are the ranks of a trainer: they get RANK, LOCAL_RANK and WORLD_SIZE."""
        return self.role == "trainer"

    @property
    def is_server(self) -> bool:
        """Whether it is one of several inference servers, of which a run may lose some."""
        return self.role == "server"


class Node(NamedTuple):
    """A machine on which members can be started.

    Attributes:
        name: unique among the nodes.
        address: by which other nodes reach it.
        gpus: number of GPUs that the run may use there. They are numbered from 0.
    """

    name: str
    address: str
    gpus: int = 0


class Place(NamedTuple):
    """Where a member runs.

    Attributes:
        node: name of the node.
        gpus: numbers of its GPUs on the node.
    """

    node: str
    gpus: tuple[int, ...] = ()


class ProcessEnd(NamedTuple):
    """How a process has ended.

    Attributes:
        code: exit code; negative for the signal that killed it; None if its node was lost with it.
        last_words: the end of its log.
    """

    code: int | None
    last_words: str = ""

    def describe(self) -> str:
        """Return the exit as a text, with the end of the log."""
        text = describe_exit(self.code)
        return f"{text}; the end of its log:\n{self.last_words}" if self.last_words else text


def describe_exit(code: int | None) -> str:
    """Return an exit code as a text.

    Args:
        code: exit code; negative for the signal that killed the process; None if its node was lost with it.

    Example:
        >>> from areal_core.launchers import describe_exit
        >>> describe_exit(1), describe_exit(-9)
        ('ended with exit code 1', 'was killed by SIGKILL')
    """
    import signal

    if code is None:
        return "was lost: nothing reports its exit code, so its guard or its node is gone too"
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # only two real-time signals have names
    return f"was killed by {names.get(-code, f'signal {-code}')}"


class RunningGroup(Protocol):
    """Members that one call of `Launcher.start` has started."""

    async def wait(self) -> str:
        """Wait until the launcher believes that all members have ended, and return how they ended.

        The driver shows the text for members that never joined the hub.
        """

    async def end(self) -> None:
        """Kill what is left and release its resources. A second call does nothing.

        The driver closes its connections to the members first, and their guards then kill them. Give these a second or
        two before you kill what was started.
        """


class Launcher(Protocol):
    """Starts the members of process groups where the driver has placed them.

    Its settings derive from `areal_core.config.LauncherSettings`. A launcher to which machines connect is also an
    `AcceptsNodes`.

    Attributes:
        host: address of this machine by which members reach the driver. Reading it may take long, as it may query a
            cluster.

    Example:
        >>> import asyncio
        >>> from areal_core.launchers import Launcher, Node, Place, ProcessGroup, RunningGroup
        >>> from areal_core.launchers import member_environment, spawn
        >>> class ThisMachine:
        ...     host = "127.0.0.1"
        ...     running = ()
        ...
        ...     async def nodes(self, groups):
        ...         return [Node("here", self.host)]
        ...
        ...     async def start(self, group, places, environment) -> RunningGroup:
        ...         common = {**environment, **group.environment}
        ...         variables = [common | member_environment(group, {index: place}) for index, place in places.items()]
        ...         started = await spawn(group.command, variables)
        ...         self.running = (*self.running, started)
        ...         return started
        ...
        ...     async def close(self):
        ...         for started in self.running:
        ...             await started.end()
        >>> async def main(launcher: Launcher) -> str:
        ...     group = ProcessGroup("greeter", "greeter", ["sh", "-c", 'test "$AREAL_GROUP" = greeter'])
        ...     started = await launcher.start(group, {0: Place("here")}, environment={})
        ...     try:
        ...         return await started.wait()
        ...     finally:
        ...         await launcher.close()
        >>> asyncio.run(main(ThisMachine()))
        'ended with exit code 0'
    """

    host: str

    async def nodes(self, groups: Sequence[ProcessGroup]) -> Sequence[Node]:
        """Return the nodes that the run may use now, in the order in which they are filled.

        Args:
            groups: groups that will be started. A launcher that must request resources requests those of these groups.

        Raises:
            RunError: there are not enough resources. The message says what there is.
        """

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> RunningGroup:
        """Start members of a group, and return without waiting for them.

        Every member runs `group.command`. Its environment is the node's own, with these variables added:

        1. `environment`, by which the member finds the driver;
        2. `group.environment`;
        3. `areal_core.launchers.member_environment(group, {index: place})`, which names its place.

        The working folder is this program's, if it exists on the node. What you start becomes the guard of the member:
        it forks the member, redirects the output of both to the member's log, and exits when nothing of the member is
        left. Its output before that is yours; show its end in `RunningGroup.wait`.

        If one command starts several members, as `srun` does, name all their places in the order of its tasks. Each
        task reads its number from `SLURM_PROCID` or `AREAL_TASK`.

        Args:
            group: the members' group.
            places: places by index of the member in its group.
            environment: variables for every member.

        Raises:
            RunError: the members cannot be started.
        """

    async def close(self) -> None:
        """Kill everything that is left, and release all resources. A second call does nothing."""


@runtime_checkable
class RequestsRoom(Protocol):
    """A launcher that can request more resources of its cluster, for servers beyond the minimum."""

    async def request(self, group: ProcessGroup) -> bool:
        """Request resources for a group, unless that was done before.

        Returns:
            Whether `nodes` contains them by now.
        """


@runtime_checkable
class AcceptsNodes(Protocol):
    """A launcher to which machines connect, because another program starts them.

    Example:
        >>> import asyncio
        >>> from areal_core.launchers import AcceptsNodes
        >>> from areal_core.processes import Done, connect, private_folder, serve
        >>> class Waiting:
        ...     async def accept_node(self, connection):
        ...         connection.notify(Done())  # the machine is accepted
        ...         await connection.receive()  # until it closes the connection
        >>> isinstance(Waiting(), AcceptsNodes)
        True
        >>> async def join():
        ...     with private_folder() as folder:
        ...         hub = await serve(f"unix:{folder / 'hub.sock'}", Waiting().accept_node)
        ...         machine = await connect(hub.address, 5, "node")
        ...         print(await machine.receive())
        ...         await machine.close()
        ...         hub.close()
        >>> asyncio.run(join())
        Done()
    """

    async def accept_node(self, connection: Any) -> None:
        """Serve the connection of a machine until it closes.

        The driver's hub calls this for each connection that a machine opens with
        `areal_core.processes.connect(address, timeout_s, "node", credentials)`. A machine may still show the
        credentials of an earlier attempt. The launcher sends the first message: other launchers refuse machines, and
        then the hub sends `areal_core.processes.Failed` first.

        Args:
            connection: an `areal_core.processes.Peer`; its messages are the launcher's.

        Raises:
            PeerClosed: the machine has closed the connection. The hub expects this end.
        """
