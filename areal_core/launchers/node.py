"""The agent of a machine that somebody else brings: starts what the driver places here, and ends with its hub."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.launchers.local import Spawned, spawn
from areal_core.launchers.machine import count_gpus
from areal_core.messages import Credentials, PeerClosed, connect
from areal_core.messages.hub import EndMembers, MembersEnded, NodeReady, StartMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_core.messages import Peer

CONNECT_TIMEOUT_S, ANSWER_S = 2.0, 60.0
"""For the driver to be there, who may be dead, and a new one is looked for; and for it to answer."""
GRACE_S = 5.0
"""For guards to end what is theirs when the hub is gone."""
NODE_VARIABLE = "AREAL_NODE"
"""Names a machine among its like, where the host's name does not."""


async def serve_node(address: str, credentials: Credentials, on_taken: Callable[[], None]) -> None:
    """Be a machine of a run until its driver has exited; on return nothing of the run is left here.

    Args:
        address: of the driver's hub.
        credentials: of the run, as they stand in its folder: who has read them sees that.
        on_taken: called when the driver has taken this machine.

    Raises:
        OSError: there is no way to the driver.
        RunError: it does not take this machine; says why.
    """
    groups: dict[str, Spawned] = {}
    peer = await connect(address, CONNECT_TIMEOUT_S, "node", credentials)
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    loop = asyncio.get_running_loop()
    try:
        ready = NodeReady(name, peer.own_host, count_gpus())
        await peer.request(ready, ANSWER_S, "a place among the machines of the run")
        on_taken()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignored
                loop.add_signal_handler(number, _pass_on, number, groups, peer)
        while True:
            message = await peer.receive()
            match message:
                case StartMembers(group, command, environments):
                    try:
                        groups[group] = await spawn(command, environments)
                    except RunError as error:
                        peer.notify(MembersEnded(group, error.message))
                    else:
                        start_task(_report(peer, group, groups), f"end of {group}")
                case EndMembers(group) if group in groups:
                    start_task(groups[group].end(), f"end of {group}")
    except PeerClosed:
        return
    finally:
        await peer.close()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
        leaving = [asyncio.ensure_future(group.wait()) for group in groups.values()]
        if leaving:
            await asyncio.wait(leaving, timeout=GRACE_S)
        await asyncio.gather(*(group.end() for group in groups.values()))


def _pass_on(number: int, groups: Mapping[str, Spawned], peer: Peer) -> None:
    """This machine is about to be taken away: its members tell the driver, which decides; without any it just goes."""
    if not groups:
        peer.abort()
    for group in groups.values():
        group.signal(number)


async def _report(peer: Peer, group: str, groups: dict[str, Spawned]) -> None:
    how = await groups[group].wait()
    del groups[group]
    try:
        peer.notify(MembersEnded(group, how))
    except PeerClosed:
        return
