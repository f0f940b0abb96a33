"""A process of a run: it joins the driver's hub, beats, says what it does and why it dies, and asks for things.

`join` forks: the parent, whose number the launcher knows, becomes the guard (`guard.py`). Whichever of the two is
killed, the other one ends what is left. When the hub hangs up or does not answer any more, both end.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_core.background import on_failure, start_task, start_thread
from areal_core.disk import append_events
from areal_core.errors import ArealError, LostError, RunError
from areal_core.launchers.guard import (
    HUB_VARIABLE,
    SCRATCH_VARIABLE,
    Guard,
    Guarded,
    adopt_orphans,
    end_descendants,
    make_scratch,
    open_log,
    timeline_of,
)
from areal_core.launchers.machine import interface_of, show_gpus
from areal_core.launchers.places import GROUP_VARIABLE, OwnPlace, own_place
from areal_core.messages import Failed, LoopThread, Peer, PeerClosed, adopt, connect_blocking, frames
from areal_core.messages.credentials import Credentials, Refused
from areal_core.messages.hub import (
    Announce,
    Ask,
    Beat,
    Failing,
    Finished,
    Heard,
    Join,
    Notice,
    Servers,
    Signaled,
    Stop,
    Watch,
    Welcome,
)
from areal_core.proxies import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future


LOGS_VARIABLE, TOKEN_FILE_VARIABLE = "AREAL_LOGS", "AREAL_TOKEN_FILE"
NODES_VARIABLE = "AREAL_NODES"
"""How many nodes the run has, where there are several."""
GUARDED_VARIABLE = "AREAL_GUARDED"
"""The connection that a guard has made for the member that it forked."""
CONNECT_TIMEOUT_S = 60.0
BEAT_S = 1.0
SHORTEST_PHASE_S = 0.001
"""That is written down."""
SILENCE_S = 60.0
"""For which a process may say nothing, but where a phase says more."""
LOADING_SILENCE_S = 600.0
"""The same while it imports or loads, which may hold the interpreter for long."""
UNANSWERED_BEATS = 20
"""After which the driver counts as gone."""
ASKED_TO_STOP, DRIVER_GONE = 75, 76
"""Exit codes: of a process that was asked to stop and did, and of one whose driver is gone."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Where PyTorch's collectives look for the network that they use."""


class Member:
    """This process in its run; its methods may be called from any thread.

    Args:
        connection: to the hub.
        name: of this member.
        address: of this machine, as other processes of the run reach it.

    Attributes:
        on_stop: called, in a thread, when the run was asked to stop; by default the process ends.
    """

    def __init__(self, connection: socket.socket, name: str, address: str) -> None:
        self.name, self.host = name, address
        self.on_stop: Callable[[], object] = lambda: self._exit(ASKED_TO_STOP)
        self._phase, self._limit_s, self._silence_s, self._since = "starting", 0.0, LOADING_SILENCE_S, time.monotonic()
        self._log = log_of(os.environ, name)
        self._handler: Callable[[Any, int], None] = lambda *_: None
        self._watched: dict[str, Callable[[Servers], None]] = {}
        self._unanswered = 0
        self._thread = LoopThread("connection to the driver")
        self._thread.call(self._open(connection))

    async def _open(self, connection: socket.socket) -> None:
        self._peer: Peer = await adopt(
            connection
        )  # before anything is heard, for what is heard may be answered at once
        start_task(self._listen(self._peer), "messages of the driver")
        start_task(self._beat(self._peer), "beats for the driver")
        with suppress(OSError):
            asyncio.get_running_loop().add_reader(os.pidfd_open(os.getppid()), self._die)

    @contextmanager
    def phase(self, name: str, limit_s: float = 0.0, silence_s: float = SILENCE_S) -> Iterator[None]:
        """Say what this process is doing while it is inside.

        Args:
            name: of the phase.
            limit_s: after which the driver counts this process as hanging; 0 is never.
            silence_s: for which it may beat no more, because something holds the interpreter.
        """
        former = self._phase, self._limit_s, self._silence_s
        self.enter(name, limit_s, silence_s)
        try:
            yield
        finally:
            self.enter(*former)

    def enter(self, name: str, limit_s: float = 0.0, silence_s: float = SILENCE_S) -> None:
        """Say what this process is doing from now on; see `phase`. What it did before is written beside its log."""
        seconds, now = time.monotonic() - self._since, time.time()
        if self._log is not None and seconds > SHORTEST_PHASE_S:
            append_events(timeline_of(self._log), {"phase": self._phase, "begin": now - seconds, "end": now})
        self._phase, self._limit_s, self._silence_s, self._since = name, limit_s, silence_s, time.monotonic()
        self.notify(Beat(name, 0.0, limit_s, silence_s))

    def notify(self, message: Any, number: int = 0) -> None:
        """Send the driver a message; nothing happens where it is gone, for then this process is about to end."""

        def send() -> None:
            with suppress(PeerClosed):
                self._peer.notify(message, number)

        self._thread.loop.call_soon_threadsafe(send)

    def log(self, text: str) -> None:
        """Show a line to whoever watches the run."""
        self.notify(Notice(text))

    def request(self, message: Any, timeout_s: float | None, waiting_for: str) -> Future[Any]:
        """Ask the driver for something; the future brings the reply, or raises as `Peer.request`."""
        return self._thread.start(self._peer.request(message, timeout_s, waiting_for))

    def announce(self, name: str, address: str) -> None:
        """Let others know where this process serves something."""
        self.notify(Announce(name, address))

    def ask(self, name: str, timeout_s: float) -> str:
        """The address that was announced under a name, or will be within `timeout_s` seconds.

        Raises:
            RunError: nobody announced it in time.
        """
        with self.phase(f"waiting for {name}"):
            try:
                announced: Announce = self.request(Ask(name), timeout_s, f"the address of {name}").result()
            except RunError as error:
                error.hints = (*error.hints, "a start that takes longer: raise training.phase_timeout_s")
                raise
        return announced.address

    def watch(self, role: str, changed: Callable[[Servers], None]) -> None:
        """Be told, in a thread, of all members of a role that serve, now and at each change."""
        self._watched[role] = changed
        self.notify(Watch(role))

    def on_message(self, handler: Callable[[Any, int], None]) -> None:
        """What to do with other messages, called in a thread with each and the number to answer it under."""
        self._handler = handler

    def die(self, error: BaseException) -> int:
        """Say why this process ends; the exit code that it shall end with."""
        if isinstance(error, ArealError):
            kind = isinstance(error, PeerClosed), isinstance(error, LostError)
            self.notify(Failing(error.message, error.hints, error.exit_code, "", *kind))
            code = error.exit_code
        else:
            told, code = "".join(traceback.format_exception(error)), 1
            sys.stderr.write(told)
            self.notify(Failing(f"{type(error).__name__}: {error}"[:2000], (), 1, told[-20_000:]))
        self.flush()
        return code

    def flush(self) -> None:
        """Wait a moment until everything is sent."""

        async def sent() -> None:
            deadline = time.monotonic() + 5.0
            await asyncio.sleep(0)
            while self._peer.is_sending and time.monotonic() < deadline:
                await asyncio.sleep(0.005)

        with suppress(Exception):
            self._thread.start(sent()).result(6.0)

    def _exit(self, code: int) -> None:
        def leave() -> None:
            self.notify(Finished())
            self.flush()
            sys.stderr.flush()
            os._exit(code)

        start_thread(leave, "leaving")  # this may be the thread whose messages leave first

    async def _beat(self, peer: Peer) -> None:
        with suppress(PeerClosed):
            while True:
                peer.notify(Beat(self._phase, time.monotonic() - self._since, self._limit_s, self._silence_s))
                self._unanswered += 1
                if self._unanswered > UNANSWERED_BEATS:
                    sys.stderr.write(f"the driver has not answered {UNANSWERED_BEATS} beats: this process ends\n")
                    self._die()
                await asyncio.sleep(BEAT_S)

    async def _listen(self, peer: Peer) -> None:
        try:
            while True:
                message, number = await peer.receive_request()
                match message:
                    case Heard():
                        self._unanswered = 0
                    case Stop():
                        self.on_stop()
                    case Servers():
                        for changed in self._watched.values():
                            changed(message)
                    case _:
                        self._handler(message, number)
        except PeerClosed:
            self._die()

    def _die(self) -> NoReturn:
        """The hub or the guard is gone. The guard does the same; it takes the death of both to leave something."""
        end_descendants()
        shutil.rmtree(os.environ.get(SCRATCH_VARIABLE, "/nonexistent"), ignore_errors=True)
        os._exit(DRIVER_GONE)


def log_of(environment: Mapping[str, str], name: str) -> Path | None:
    """What a member writes to; None where nobody has said so."""
    return Path(environment[LOGS_VARIABLE]) / f"{name}.log" if LOGS_VARIABLE in environment else None


def join() -> Member:
    """Become the member of a run that the environment says. Call it first of all: before threads, torch and CUDA."""
    place, group = own_place(os.environ), os.environ[GROUP_VARIABLE]
    if given := os.environ.pop(GUARDED_VARIABLE, ""):
        connection = socket.socket(fileno=int(given))
    else:
        connection = _fork_below_guard(group, place)
    adopt_orphans()  # so that orphans are found here when the guard is killed, and there when this is
    welcome = _hello(connection, group, place)
    os.environ.update(welcome.environment)
    own = str(connection.getsockname()[0])
    bypass_proxies(hosts=[own])
    if NODES_VARIABLE in welcome.environment:
        os.environ.update({name: os.environ.get(name, interface_of(own)) for name in INTERFACE_VARIABLES})
    if place.gpus:
        show_gpus(place.gpus)
    connection.settimeout(None)
    member = Member(connection, place.name, own)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: member.notify(Signaled(number)))
    return member


def _fork_below_guard(group: str, place: OwnPlace) -> socket.socket:
    """Fork; the parent becomes the guard and never returns. The connection to the hub, behind its hello."""
    adopt_orphans()
    if (log := log_of(os.environ, place.name)) is not None:
        open_log(log)
    hub, shown = os.environ[HUB_VARIABLE], Credentials.from_environment()
    connection = connect_blocking(hub, CONNECT_TIMEOUT_S, "member", shown)
    scratch, guard = make_scratch(), os.getpid()
    os.environ[SCRATCH_VARIABLE] = str(scratch)
    if child := os.fork():
        _guard(Guarded(child, connection, hub, shown, group, place.number, log, scratch))
    if os.getppid() != guard:
        os._exit(DRIVER_GONE)
    return connection


def _pass_on(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it may just be ending
        os.kill(pid, number)


def _guard(member: Guarded) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: _pass_on(member.pid, number))
    guard = Guard()
    guard.add(member)
    while True:
        _, ended = guard.wait()
        for code in ended.values():
            os._exit(code if code >= 0 else 128 - code)


def _hello(connection: socket.socket, group: str, place: OwnPlace) -> Welcome:
    """Join the hub; ends this process where it is refused."""
    connection.settimeout(CONNECT_TIMEOUT_S)
    sees_run = False
    with suppress(OSError, KeyError):
        sees_run = Path(os.environ[TOKEN_FILE_VARIABLE]).read_text() == Credentials.from_environment().token
    host = place.node or socket.gethostname()
    try:
        frames.send(connection, Join(group, place.number, host, os.getpid(), sees_run), 1)
        answer = frames.receive(connection).message
    except (PeerClosed, TimeoutError) as error:
        sys.stderr.write(f"the driver does not answer: {error}\n")
        os._exit(DRIVER_GONE)
    if not isinstance(answer, Welcome):
        why = answer.reason if isinstance(answer, Refused) else answer.text if isinstance(answer, Failed) else answer
        sys.stderr.write(f"the driver has refused this process: {why}\n")
        os._exit(DRIVER_GONE)
    return answer


def current_attempt() -> int:
    """The attempt of the run that this process belongs to."""
    return Credentials.from_environment().attempt


class _Log(io.TextIOWrapper):
    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def lose_lines_on_a_full_disk() -> None:
    """What this process says on standard output and error is lost where it cannot be written, and ends no process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        setattr(sys, name, _Log(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True))


def run_role(role: Callable[[Member], int]) -> int:
    """Run a process of a run to its end; its exit code.

    Args:
        role: the work; what it raises is told to the driver, as is what background work raises.
    """
    lose_lines_on_a_full_disk()
    member = join()
    on_failure(lambda _, error: _end_now(member, error))
    try:
        code = role(member)
    except BaseException as error:  # noqa: BLE001 - whatever it is, also `sys.exit`, the driver must be told
        return member.die(error)
    member.notify(Finished())
    member.flush()
    return code


def _end_now(member: Member, error: BaseException) -> None:
    code = member.die(error)
    sys.stderr.flush()
    os._exit(code)
