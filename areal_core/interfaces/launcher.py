"""The processes of a run: what each is, who starts them, and how a launcher brings a warden to a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class EndMeans(StrEnum):
    """What the end of a process means for its run."""

    ENDS_RUN = "ends the run"
    REPLACED = "replaced"
    """Whoever asked for it is told, and starts another one or does without."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a process needs of its node.

    Attributes:
        cores: CPU cores that it computes with; 0 where it only waits.
        gpus: by number, counted through all nodes of the run; None for those that the node shows.
        memory_bytes: of main memory; 0 where nobody has counted.
        spare: so many GPUs of one node that no process holds, any of `gpus`, or of all where that is None. Where no
            node has a GPU, a node on which no process of the run listens. None for exactly `gpus`.
    """

    cores: int = 0
    gpus: tuple[int, ...] | None = None
    memory_bytes: int = 0
    spare: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpecification:
    """One process of a run, whatever launches it.

    Attributes:
        name: unique in the run, such as `trainer-0`; its output goes to `logs/<name>.log`.
        role: what it is for, such as `trainer`.
        command: of the operating system, the program first.
        environment: added to the node's own.
        needs: of its node.
        node: name of the node where it must stand; empty for another choice.
        beside: name of the process on whose node it must stand; empty for the node of whoever starts it.
        end: what its end means.
        speaks: whether it is a program of areal's own, which beats and is told things over a link to the supervisor.
        port: on which it listens; 0 for none.
    """

    name: str
    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Needs = Needs()
    node: str = ""
    beside: str = ""
    end: EndMeans = EndMeans.ENDS_RUN
    speaks: bool = False
    port: int = 0


NODE_VARIABLE = "AREAL_NODE"
"""Names a node among its like, where the host's name does not."""
UNTIL_INPUT_ENDS = "--until-input-ends"
"""Word behind a warden's command: it also ends when its standard input does."""
LOST = -100
"""In place of an exit code: the node of the process, or the way to it, is gone."""


class ProcessEnd(NamedTuple):
    """How a process has ended.

    Attributes:
        code: exit code; negative for the signal that killed it; `LOST`.
        last_words: the end of what it wrote.
    """

    code: int
    last_words: str

    def describe(self) -> str:
        """In words, with what it wrote last."""
        how = describe_exit(self.code)
        return f"{how}; the end of its log:\n{self.last_words}" if self.last_words else how


def describe_exit(code: int) -> str:
    """An exit code in words: `ended with exit code 1`, `was killed by SIGKILL`."""
    import signal

    if code == LOST:
        return "was lost with its node"
    names = {number.value: number.name for number in signal.Signals}  # of real-time signals only two have names
    return f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


class Place(NamedTuple):
    """Where a process can listen.

    Attributes:
        node: its name, for `ProcessSpecification.node`.
        address: of the node, as other processes of the run reach it.
        port: on which nobody listened there a moment ago.
        gpus: for `Needs.gpus` of the process that is started there.
    """

    node: str
    address: str
    port: int
    gpus: tuple[int, ...] | None = None


class RunningProcess(Protocol):
    """A process that was started, as its starter sees it."""

    name: str

    async def wait(self) -> ProcessEnd:
        """Until it has ended, and with it everything that it ever started."""

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        """End it: SIGTERM, and SIGKILL after `grace_s` seconds; safe to call twice."""


class Processes(Protocol):
    """Starts processes of a run: what an engine, a pool or any other part is given that needs some.

    Attributes:
        host: address by which other nodes of the run reach this one; loopback where there are none.
    """

    host: str

    async def find_place(self, needs: Needs) -> Place:
        """A node that has what a process needs, the one with the fewest processes where several do, and a port there.

        Raises:
            RunError: there is no such node, or no room now.
        """

    async def adopt(self, name: str) -> tuple[RunningProcess, Place] | None:
        """A process that still runs, started under this name for whoever had this one's part before, and its place."""

    async def start(self, specification: ProcessSpecification) -> RunningProcess:
        """Start a process and return at once.

        Its end is the starter's affair (`EndMeans.REPLACED`), whatever the specification says.

        Raises:
            RunError: there is no room for it.
        """


class Launcher(Protocol):
    """Brings one warden to each node of a run, and ends nodes. Everything else is the wardens'.

    Its settings are derived from `areal_core.config.LauncherSettings`, where the core reads how many ranks there are.

    Attributes:
        host: address on which the supervisor listens for the wardens.
        joining_s: not needed; seconds that nodes have which join by themselves (`areal join`), as the user is told.
    """

    host: str

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Begin to run the command, a warden, once on every node, with these variables; how many will come.

        A node that has a name among its like is told it in the variable `AREAL_NODE`; otherwise its host's counts.
        With `UNTIL_INPUT_ENDS` behind it, the command also ends when its standard input does.
        GPUs that are not the run's are hidden from it by `CUDA_VISIBLE_DEVICES`.

        Raises:
            RunError: a node cannot be had; says which, and what there is.
        """

    def lost(self) -> Mapping[str, str]:
        """Nodes whose warden could not be started or has ended for sure, by name, with the reason."""

    def close(self) -> None:
        """End all nodes; confirmed on return; safe to call twice."""
