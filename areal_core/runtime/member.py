"""A process of a run, seen from inside: it joins the driver's hub, sends heartbeats, and reports how it ends.

`run_role` is the main function of such a process:

    lose_lines_on_a_full_disk()     a full disk costs log lines, and no process
    member = join()                 fork below a guard, if there is none; connect; register at the hub
    code = role(member)             the work: a trainer rank, a server, a rollout worker, ...
    member.notify(Finished())       or `ProcessFailed` with the error that the work has raised

A thread of its own holds the connection and sends a heartbeat a second. The driver notices two kinds of hangs:

    the whole process           no heartbeats come: it is stopped, or a call holds the interpreter
    only its main thread        heartbeats still come, and show that the phase has exceeded its limit; without a limit,
                                the driver does not notice

If the hub does not answer, or closes the connection, or the guard dies, the process kills its descendants and exits.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_core.background import on_failure, start_task, start_thread
from areal_core.disk import append_events
from areal_core.errors import ArealError, LostError, RunError
from areal_core.gpus import show_gpus
from areal_core.proxies import bypass_proxies
from areal_core.runtime import frames
from areal_core.runtime.environment import (
    CONNECTION_VARIABLE,
    GUARD_VARIABLE,
    NODES_VARIABLE,
    SCRATCH_VARIABLE,
    TOKEN_FILE_VARIABLE,
    MemberPlace,
    member_place,
)
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.guard import CONNECT_TIMEOUT_S, fork_below_guard
from areal_core.runtime.logs import lose_lines_on_a_full_disk, member_log, timeline_of
from areal_core.runtime.messages import (
    Announce,
    Finished,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    LogLine,
    Lookup,
    ProcessFailed,
    RoleMembers,
    Signaled,
    Stop,
    Watch,
)
from areal_core.runtime.network import interface_of
from areal_core.runtime.process_tree import adopt_orphans, end_descendants
from areal_core.runtime.rpc import Credentials, Failed, LoopThread, Peer, PeerClosed, Refused, adopt

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from concurrent.futures import Future

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats."""
UNANSWERED_HEARTBEATS = 20
"""Heartbeats without an answer after which the driver is considered gone."""
SILENCE_S = 60.0
"""Seconds without a heartbeat after which the driver considers a process lost, unless its phase allows more."""
LOADING_SILENCE_S = 600.0
"""The same in a phase of imports or loading, which may hold the interpreter for long."""
SHORTEST_PHASE_S = 0.001
"""Seconds of the shortest phase that is written to the timeline."""
FLUSH_TIMEOUT_S = 5.0
"""Seconds in which the last messages of a process must leave."""
ASKED_TO_STOP = 75
"""Exit code of a process that has stopped because the run was asked to."""
DRIVER_GONE = 76
"""Exit code of a process whose driver is gone."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the network interface for PyTorch's collectives."""
LONGEST_ERROR = 2000
"""Characters of an unexpected error's message that the driver is sent."""
LONGEST_TRACEBACK = 20_000
"""Characters of a traceback, from its end, that the driver is sent."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """What the process is doing, and since when by `time.monotonic()`; see `Heartbeat`.

    It is one object, so that a heartbeat cannot pair the limit of a phase with the age of the former one.
    """

    name: str
    limit_s: float
    silence_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since its begin."""
        return time.monotonic() - self.began


class Member:
    """This process in its run. Its methods may be called from any thread.

    Args:
        connection: to the hub.
        name: of this member.
        address: of this machine, by which other processes of the run reach it.

    Attributes:
        name: of this member.
        host: the address.
        on_stop: called in a thread when the run is asked to stop. By default the process exits.
    """

    def __init__(self, connection: socket.socket, name: str, address: str) -> None:
        self.name = name
        self.host = address
        self.on_stop: Callable[[], object] = lambda: self._exit(ASKED_TO_STOP)
        self._phase = _Phase("starting", 0.0, LOADING_SILENCE_S)
        self._log = member_log(os.environ, name)
        self._handler: Callable[[Any, int], None] = lambda *_: None
        self._watchers: dict[str, Callable[[RoleMembers], None]] = {}
        self._unanswered_heartbeats = 0
        self._thread = LoopThread("connection to the driver")
        self._thread.call(self._open(connection))

    @contextmanager
    def phase(self, name: str, limit_s: float = 0.0, silence_s: float = SILENCE_S) -> Iterator[None]:
        """Be in a phase inside the block, and in the former one after it.

        Args:
            name: what the process is doing, for the status and the timeline.
            limit_s: seconds after which the driver considers the process stuck; 0 for no limit.
            silence_s: seconds without a heartbeat after which the driver considers the process lost.
        """
        former = self._phase
        self.enter(name, limit_s, silence_s)
        try:
            yield
        finally:
            self.enter(former.name, former.limit_s, former.silence_s)

    def enter(self, name: str, limit_s: float = 0.0, silence_s: float = SILENCE_S) -> None:
        """Begin a phase; see `phase`. Write the former one to the timeline beside the log."""
        seconds = self._phase.seconds
        if self._log is not None and seconds > SHORTEST_PHASE_S:
            end = time.time()
            append_events(timeline_of(self._log), {"phase": self._phase.name, "begin": end - seconds, "end": end})
        self._phase = _Phase(name, limit_s, silence_s)
        self.notify(Heartbeat(name, 0.0, limit_s, silence_s))

    def enter_loading(self, name: str, limit_s: float = 0.0) -> None:
        """Begin a phase of imports or loading, in which the interpreter may be held for long; see `phase`."""
        self.enter(name, limit_s, LOADING_SILENCE_S)

    @property
    def scratch(self) -> Path:
        """The folder of this process for sockets and temporary files. It is removed when the process has ended."""
        return Path(os.environ[SCRATCH_VARIABLE])

    def notify(self, message: Any, number: int = 0) -> None:
        """Send a message to the driver. Do nothing if it is gone, because then this process is about to end.

        Args:
            message: the message.
            number: 0, or the negated number of a request that this answers.
        """

        def send() -> None:
            with suppress(PeerClosed):
                self._peer.notify(message, number)

        self._thread.loop.call_soon_threadsafe(send)

    def log(self, text: str) -> None:
        """Write a line to the run's log and the terminal."""
        self.notify(LogLine(text))

    def request(self, message: Any, timeout_s: float | None, waiting_for: str) -> Future[Any]:
        """Send a request to the driver; see `Peer.request`. The future gets its reply."""
        return self._thread.start(self._peer.request(message, timeout_s, waiting_for))

    def announce(self, name: str, address: str) -> None:
        """Let other members find an address at which this process serves something. The member is ready then."""
        self.notify(Announce(name, address))

    def lookup(self, name: str, timeout_s: float) -> str:
        """Return the address that a member has announced under a name, or will announce in time.

        Raises:
            RunError: no member has announced it within `timeout_s` seconds.
        """
        with self.phase(f"waiting for {name}"):
            try:
                announced: Announce = self.request(Lookup(name), timeout_s, f"the address of {name}").result()
            except RunError as error:
                error.hints = (*error.hints, "a start that takes longer: raise training.phase_timeout_s")
                raise
        return announced.address

    def watch(self, role: str, changed: Callable[[RoleMembers], None]) -> None:
        """Call `changed` in a thread with the members of a role that serve: now, and whenever they change."""
        self._watchers[role] = changed
        self.notify(Watch(role))

    def on_message(self, handler: Callable[[Any, int], None]) -> None:
        """Call `handler` in a thread with each other message of the driver, and its number for `notify`."""
        self._handler = handler

    def run(self, work: Coroutine[Any, Any, None]) -> int:
        """Run the work of this process in an event loop. If the run is asked to stop, the work is cancelled.

        Args:
            work: the coroutine. An exception that it raises is raised here.

        Returns:
            The exit code of the process, for `run_role`.
        """

        async def stoppable() -> None:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            self.on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
            await work

        try:
            run_event_loop(stoppable())
        except asyncio.CancelledError:
            return ASKED_TO_STOP
        return 0

    def report_failure(self, error: BaseException) -> int:
        """Send the driver the error that ends this process, and return the exit code."""
        if isinstance(error, ArealError):
            report = ProcessFailed(
                error.message,
                error.hints,
                error.exit_code,
                traceback="",
                is_consequence=isinstance(error, PeerClosed),
                is_loss=isinstance(error, LostError),
            )
        else:
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(text)
            message = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
            report = ProcessFailed(message, hints=(), exit_code=1, traceback=text[-LONGEST_TRACEBACK:])
        self.notify(report)
        self.flush()
        return report.exit_code

    def fail(self, error: BaseException) -> None:
        """Send the driver the error that ends this process, and exit. It may be called in any thread."""

        def leave() -> None:
            code = self.report_failure(error)
            sys.stderr.flush()
            os._exit(code)

        if self._thread.is_current:  # it must send the report, so it cannot wait until the report has left
            start_thread(leave, "exit")
        else:
            leave()

    def flush(self) -> None:
        """Wait until all messages have left, for a few seconds at most.

        Do not call it in a callback: the thread that runs it must send the messages.
        """

        async def wait() -> None:
            deadline = time.monotonic() + FLUSH_TIMEOUT_S
            await asyncio.sleep(0)  # messages of `notify` come first
            while self._peer.is_sending and time.monotonic() < deadline:
                await asyncio.sleep(0.005)

        with suppress(Exception):
            self._thread.start(wait()).result(FLUSH_TIMEOUT_S + 1)

    def _exit(self, code: int) -> None:
        def leave() -> None:
            self.notify(Finished())
            self.flush()
            sys.stderr.flush()
            os._exit(code)

        start_thread(leave, "exit")  # the caller may be the thread that must send the last messages

    # In the thread of the connection.

    async def _open(self, connection: socket.socket) -> None:
        self._peer: Peer = await adopt(connection)  # set it before a message arrives, which may need an answer
        start_task(self._receive(self._peer), "messages of the driver")
        start_task(self._send_heartbeats(self._peer), "heartbeats to the driver")
        with suppress(OSError):
            asyncio.get_running_loop().add_reader(os.pidfd_open(os.getppid()), _exit_without_driver)

    async def _send_heartbeats(self, peer: Peer) -> None:
        with suppress(PeerClosed):
            while True:
                phase = self._phase
                peer.notify(Heartbeat(phase.name, phase.seconds, phase.limit_s, phase.silence_s))
                self._unanswered_heartbeats += 1
                if self._unanswered_heartbeats > UNANSWERED_HEARTBEATS:
                    sys.stderr.write(f"the driver has not answered {UNANSWERED_HEARTBEATS} heartbeats: exiting\n")
                    _exit_without_driver()
                await asyncio.sleep(HEARTBEAT_S)

    async def _receive(self, peer: Peer) -> None:
        try:
            while True:
                message, number = await peer.receive_request()
                match message:
                    case HeartbeatAck():
                        self._unanswered_heartbeats = 0
                    case Stop():
                        self.on_stop()
                    case RoleMembers(role):
                        self._watchers[role](message)
                    case _:
                        self._handler(message, number)
        except PeerClosed:
            _exit_without_driver()


def _exit_without_driver() -> NoReturn:
    """Exit because the hub or the guard is gone, and leave nothing. The guard does the same if it still lives."""
    end_descendants()
    shutil.rmtree(os.environ.get(SCRATCH_VARIABLE, "/nonexistent"), ignore_errors=True)
    os._exit(DRIVER_GONE)


def join() -> Member:
    """Make this process the member of a run that its environment names.

    Call it first in a process: it forks, and threads, torch and CUDA do not survive that.
    """
    if CONNECTION_VARIABLE not in os.environ:
        fork_below_guard()
    connection = socket.socket(fileno=int(os.environ.pop(CONNECTION_VARIABLE)))
    guard = int(os.environ.pop(GUARD_VARIABLE))
    adopt_orphans()  # orphans must be found here if the guard is killed, and by the guard if this process is
    place = member_place(os.environ)
    joined = _register(connection, place)
    os.environ.update(joined.environment)
    address = str(connection.getsockname()[0])
    bypass_proxies(hosts=[address])
    if NODES_VARIABLE in joined.environment:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface_of(address))
    if place.gpus:
        show_gpus(place.gpus)
    connection.settimeout(None)
    member = Member(connection, place.name, address)
    if os.getppid() != guard:  # it died before the member watched it
        _exit_without_driver()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: member.notify(Signaled(number)))
    return member


def _register(connection: socket.socket, place: MemberPlace) -> Joined:
    """Register this process at the hub, and return its reply. Exit if the hub refuses it or does not answer."""
    connection.settimeout(CONNECT_TIMEOUT_S)
    sees_run = False
    with suppress(OSError, KeyError):
        sees_run = Path(os.environ[TOKEN_FILE_VARIABLE]).read_text() == Credentials.from_environment().token
    host = place.node or socket.gethostname()
    request = Join(place.group, place.index, host, os.getpid(), sees_run, place.start)
    try:
        frames.send(connection, request, 1)
        reply = frames.receive(connection).message
    except (PeerClosed, TimeoutError) as error:
        sys.stderr.write(f"{place.name} cannot join the run: the driver does not answer: {error}\n")
        os._exit(DRIVER_GONE)
    match reply:
        case Joined():
            return reply
        case Refused(reason) | Failed(reason):
            sys.stderr.write(f"{place.name} cannot join the run: the driver refuses it: {reason}\n")
        case _:
            sys.stderr.write(f"{place.name} cannot join the run: the driver sent {type(reply).__name__}\n")
    os._exit(DRIVER_GONE)


def current_attempt() -> int:
    """Return the number of the run's attempt that this process belongs to."""
    return Credentials.from_environment().attempt


def run_role(role: Callable[[Member], int]) -> int:
    """Run this process as a member of the run that its environment names, and return its exit code.

    It is the main function of a program that a `ProcessGroup` starts. `examples/programs/generate.py` has one.

    Args:
        role: the work; returns the exit code, as `Member.run` does. If it or background work raises an exception, the
            driver gets the error.
    """
    lose_lines_on_a_full_disk()
    member = join()

    on_failure(lambda _, error: member.fail(error))
    try:
        code = role(member)
    except BaseException as error:  # noqa: BLE001 - the driver must know of anything, also of `sys.exit`
        return member.report_failure(error)
    member.notify(Finished())
    member.flush()
    return code
