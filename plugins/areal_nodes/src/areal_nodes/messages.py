"""Messages between the launcher, which is in the driver, and the agent of a machine (`areal node`)."""

from __future__ import annotations

from collections.abc import Mapping

from areal_core.processes import Message

# From the launcher to an agent.


class DescribeNode(Message):
    """The first message on the connection. The agent answers with `NodeReady`."""


class StartMembers(Message):
    """Start members of a process group on this machine.

    Attributes:
        group: name of the group and number of its start. A group that is started again gets another number.
        command: command of every member.
        environments: environment variables of each member, added to those of the agent.
    """

    group: str
    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]


class EndMembers(Message):
    """Kill what was started for a group, with all its child processes.

    Attributes:
        group: as in `StartMembers`.
    """

    group: str


# From an agent to the launcher.


class NodeReady(Message):
    """The machine accepts members.

    Attributes:
        name: name of the machine. The launcher adds a number if another machine has the same name.
        address: address at which other machines reach this one.
        gpus: number of GPUs that the run may use here.
    """

    name: str
    address: str
    gpus: int


class MembersEnded(Message):
    """All members of a group on this machine have ended, or could not be started.

    Attributes:
        group: as in `StartMembers`.
        outcome: how they ended, such as `ended with exit code 1`.
    """

    group: str
    outcome: str
