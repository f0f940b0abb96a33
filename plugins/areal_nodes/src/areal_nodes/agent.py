"""Agent of a machine: it starts the members that the launcher places there, until the driver closes the connection."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.launchers import spawn
from areal_core.processes import Failed, PeerClosed, PeerRefused, connect, count_gpus, start_task
from areal_nodes.messages import DescribeNode, EndMembers, MembersEnded, NodeReady, StartMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from areal_core.launchers import LocalGroup
    from areal_core.processes import Credentials, Peer

CONNECT_TIMEOUT_S = 2.0
"""Seconds that connecting may take. It is short because the caller must find the successor of a dead driver."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds that the driver may take to answer a new connection."""
GRACE_S = 5.0
"""Seconds that guards may take to end their members after the hub has closed; then the agent kills what is left."""
NODE_VARIABLE = "AREAL_NODE"
"""Environment variable with the name of the machine; by default the name is the host's."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which a scheduler, a terminal or a user ends the agent."""


async def run_agent(address: str, credentials: Credentials, on_accepted: Callable[[], None]) -> bool:
    """Serve one attempt of a run on this machine until its driver closes the connection.

    No process of the run is left on this machine when the function returns.

    Args:
        address: address of the driver's hub.
        credentials: token of the run, which the caller has read in the run folder, and the attempt.
        on_accepted: called when the driver has accepted this machine.

    Returns:
        Whether the driver has accepted this machine; False if it closed the connection before.

    Raises:
        OSError: the driver cannot be reached.
        RunError: the driver does not answer, or refuses this machine; the message has the reason.
        KeyboardInterrupt: a signal came while this machine had no members; its argument is the signal's number.
    """
    connection = await connect(address, CONNECT_TIMEOUT_S, "node", credentials)
    agent = _Agent(connection)
    is_accepted = False
    try:
        await agent.introduce()
        is_accepted = True
        on_accepted()
        with _signals_to(agent):
            await agent.serve()
    except PeerClosed:
        pass  # the normal end: the driver has exited or died
    finally:
        await connection.close()
        await agent.end()
    if agent.interrupted_by:
        raise KeyboardInterrupt(agent.interrupted_by)
    return is_accepted


class _Agent:
    """The connection to the driver, and the members that this machine runs.

    Attributes:
        interrupted_by: number of the signal that has ended the agent; 0 before.
    """

    def __init__(self, connection: Peer) -> None:
        self.interrupted_by = 0
        self._connection = connection
        self._groups: dict[str, LocalGroup] = {}

    async def introduce(self) -> None:
        """Describe this machine to the launcher, which sends `DescribeNode` first.

        Raises:
            RunError: the driver does not answer, or refuses this machine.
            PeerClosed: the connection has closed, or the first message is another one.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                message, number = await self._connection.receive_request()
        except PeerRefused as error:
            hint = "all machines must share the run folder: compare the files token of its attempts"
            raise RunError(f"the driver refuses this machine: {error.message}", hints=[hint]) from None
        except TimeoutError:
            raise RunError(f"the driver has not answered this machine within {ANSWER_TIMEOUT_S:g} s") from None
        if isinstance(message, Failed):
            hint = "start the run with launcher.type=external; other launchers start their machines themselves"
            raise RunError(f"the driver refuses this machine: {message.text}", hints=[*message.hints, hint])
        if not isinstance(message, DescribeNode):
            raise PeerClosed(f"the driver sent {type(message).__name__} instead of DescribeNode")
        name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
        self._connection.reply(number, NodeReady(name, self._connection.own_host, count_gpus()))

    async def serve(self) -> None:
        """Start and end members until the driver closes the connection.

        Raises:
            PeerClosed: the driver has closed it.
        """
        while True:
            match await self._connection.receive():
                case StartMembers() as order:
                    await self._start(order)
                case EndMembers(group) if group in self._groups:
                    start_task(self._groups[group].end(), f"end of {group}")

    async def _start(self, order: StartMembers) -> None:
        try:
            self._groups[order.group] = await spawn(order.command, order.environments)
        except RunError as error:
            self._connection.notify(MembersEnded(order.group, error.message))
        else:
            start_task(self._report_end(order.group), f"end of {order.group}")

    async def _report_end(self, group: str) -> None:
        outcome = await self._groups[group].wait()
        del self._groups[group]
        try:
            self._connection.notify(MembersEnded(group, outcome))
        except PeerClosed:
            return  # the launcher sees the end of the connection instead

    def on_signal(self, number: int) -> None:
        """Send the members SIGTERM, which they report to the driver: this machine is about to be taken away.

        Members ignore the agent's other signals. The driver decides what happens then. Without members, the agent
        leaves the run and the program ends.
        """
        if not self._groups:
            self.interrupted_by = number
            self._connection.abort()
        for group in self._groups.values():
            group.signal(signal.SIGTERM)

    async def end(self) -> None:
        """Wait until the guards have ended all members, as they do when the hub has closed; kill the others."""
        ends = [asyncio.ensure_future(group.wait()) for group in self._groups.values()]
        if ends:
            await asyncio.wait(ends, timeout=GRACE_S)
        await asyncio.gather(*(group.end() for group in self._groups.values()))


@contextmanager
def _signals_to(agent: _Agent) -> Iterator[None]:
    """Let the agent handle the signals that end a program. Ignored signals stay ignored, as under `nohup`."""
    loop = asyncio.get_running_loop()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for number in caught:
        loop.add_signal_handler(number, agent.on_signal, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, handlers[number])
