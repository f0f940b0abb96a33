"""The warden of a node: `python -m areal_core.launchers.warden SUPERVISOR LEASE_S`, standard library only.

With `--until-input-ends` behind that, it also ends when its standard input does: whoever holds the other end is gone.

Connects to the supervisor of a run, says what its node has, and starts, signals and ends processes as it is told, each
under a keeper (`keeper.py`). When the supervisor is gone, or silent for longer than the lease, everything ends. A
signal that would end it (a scheduler takes the node away) is told to the supervisor, which decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.background import on_failure, start_task
from areal_core.interfaces.launcher import NODE_VARIABLE, UNTIL_INPUT_ENDS
from areal_core.launchers import shared_folder
from areal_core.launchers.identity import has_ended, identify
from areal_core.launchers.keepers import Keepers, KeptProcess
from areal_core.launchers.node import count_gpus, free_port, interface_of
from areal_core.messages import Channel, ChannelClosed, Credentials, connect
from areal_core.messages.processes import (
    Beat,
    EndProcess,
    FindPort,
    Leave,
    NodeBeat,
    NodeLeft,
    NodeNotice,
    NodeReady,
    Port,
    ProcessEnded,
    SignalProcess,
    StartProcess,
    TryFolder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_S = 1.0
CONNECT_TIMEOUT_S = 60.0
ALONE_EXIT_CODE = 3
"""Of a warden whose supervisor has not said that it may go, and is gone or silent: its machine may be lost."""
LET_GO_EXIT_CODE = 4
"""Of a warden that has said that its node is about to be taken away, and whose run goes on without it."""
NODES_VARIABLE = "AREAL_NODES"
"""How many nodes the run has, where there are several."""
SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""Names the node's private folder for sockets and published weights, in memory where the machine offers that."""
_OWNER = "owner"


class Warden:
    """Keeps the processes of one node.

    Args:
        channel: to the supervisor.
        scratch: the node's folder.
        lease_s: silence of the supervisor after which everything ends.
    """

    def __init__(self, channel: Channel, scratch: Path, lease_s: float) -> None:
        self._channel = channel
        self._keepers = Keepers(scratch, {SCRATCH_VARIABLE: str(scratch)}, adopts_orphans=True)
        self._lease_s = lease_s
        self._heard = time.monotonic()
        self._beat_s = BEAT_S
        self._has_given_notice = self._has_to_leave = False

    async def run(self) -> int:
        """Until the supervisor is gone; on return nothing is left. The exit code."""
        orders = start_task(self._take_orders(), "orders of the supervisor")
        told = -math.inf
        try:
            while not orders.done() and time.monotonic() - self._heard < self._lease_s:
                await asyncio.wait({orders}, timeout=BEAT_S)
                if time.monotonic() - told < self._beat_s - BEAT_S / 2:
                    continue
                told = time.monotonic()
                self._post(NodeBeat(self._keepers.stopped()))
            if self._has_to_leave:
                return 0
            return LET_GO_EXIT_CODE if self._has_given_notice and orders.done() else ALONE_EXIT_CODE
        finally:
            orders.cancel()
            await self._keepers.close()
            if self._has_to_leave:
                self._post(NodeLeft())

    def give_notice(self, number: int) -> None:
        """This node is about to be taken away."""
        self._has_given_notice = True
        self._post(NodeNotice(number))

    def _post(self, message: object) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.post(message)

    async def _take_orders(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                order, number = await self._channel.receive_request()
                self._heard = time.monotonic()
                match order:
                    case Beat(every_s):
                        self._beat_s = every_s
                    case Leave():
                        self._has_to_leave = True
                        return
                    case FindPort():
                        self._channel.reply(number, Port(free_port()))
                    case TryFolder():
                        start_task(self._try_folder(order, number), "look at the run's folder")
                    case _:
                        await self._obey(order)

    async def _try_folder(self, asked: TryFolder, number: int) -> None:
        self._channel.reply(number, await asyncio.to_thread(shared_folder.answer, asked))

    async def _obey(self, order: object) -> None:
        """One order after another: what is said of a process comes behind its start."""
        match order:
            case StartProcess():
                await self._start(order)
            case SignalProcess(name, number) if name in self._keepers.processes:
                self._keepers.processes[name].signal(number)
            case EndProcess(name, grace_s) if name in self._keepers.processes:
                start_task(self._keepers.processes[name].end(grace_s), f"end of {name}")

    async def _start(self, order: StartProcess) -> None:
        log = Path(order.log)
        try:
            process = await self._keepers.launch(order.name, order.command, order.environment, order.gpus, log)
        except (OSError, ValueError) as error:
            self._channel.post(ProcessEnded(order.name, 127, f"its keeper cannot be started: {error}"))
            return
        start_task(self._report_end(process), f"end of {order.name}")

    async def _report_end(self, process: KeptProcess) -> None:
        end = await process.wait()
        self._post(ProcessEnded(process.name, end.code, end.last_words))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new private folder, in memory where possible; those of wardens that were killed are removed first."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else Path(tempfile.gettempdir())
    for former in parent.glob("areal-node-*"):
        with contextlib.suppress(OSError):
            if has_ended((former / _OWNER).read_text()):
                shutil.rmtree(former)
    folder = Path(tempfile.mkdtemp(prefix="areal-node-", dir=parent))
    (folder / _OWNER).write_text(identify(os.getpid()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def main(supervisor: str, lease_s: float, *options: str, joining: Credentials | None = None) -> int:
    """Connect, report, and serve until the supervisor is gone; the exit code.

    That is 0, `ALONE_EXIT_CODE`, or, where `joining`, `LET_GO_EXIT_CODE`.

    Args:
        supervisor: its address.
        lease_s: silence of the supervisor after which everything ends.
        options: `UNTIL_INPUT_ENDS`, or nothing.
        joining: what a node shows that no launcher has brought; others have it in their environment.
    """
    on_failure(_end_at_once)
    if UNTIL_INPUT_ENDS in options:
        asyncio.get_running_loop().add_reader(0, _end_with_input, asyncio.current_task())
    credentials = joining or Credentials.from_environment()
    channel = await connect(supervisor, CONNECT_TIMEOUT_S, "warden", credentials)
    with scratch_folder() as scratch:
        warden = Warden(channel, scratch, lease_s)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignored
                asyncio.get_running_loop().add_signal_handler(number, warden.give_notice, number)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        host, address, cores = socket.gethostname(), channel.own_host, len(os.sched_getaffinity(0))
        name, pid = os.environ.get(NODE_VARIABLE) or host, os.getpid()
        interface = interface_of(address)
        has = (cores, memory, count_gpus())
        channel.post(NodeReady(name, host, address, interface, *has, str(scratch), pid, sys.executable, bool(joining)))
        code = await warden.run()
    await channel.close()
    return code if joining or code == ALONE_EXIT_CODE else 0


def _end_with_input(serving: asyncio.Task[int] | None) -> None:
    if serving is not None and not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        serving.cancel()


def _end_at_once(name: str, error: BaseException) -> None:
    """The keepers end everything when this process is gone."""
    traceback.print_exception(error)
    sys.stderr.write(f"the warden failed: {name}\n")
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        sys.exit(asyncio.run(main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])))
