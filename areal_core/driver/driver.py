"""The driver of processes: starts groups of them, passes on what they say, starts some again, and knows why one ended.

It knows no roles: `groups` says which processes a run has; plugins run processes of their own in the same way.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.background import on_failure, start_task, watch_event_loop
from areal_core.driver.cause import find_cause
from areal_core.driver.hub import Hub, Process
from areal_core.driver.liveness import Liveness
from areal_core.driver.members import Members
from areal_core.driver.restarts import Restarts
from areal_core.errors import RunError
from areal_core.launchers.guard import HUB_VARIABLE
from areal_core.launchers.member import ASKED_TO_STOP, LOGS_VARIABLE, TOKEN_FILE_VARIABLE
from areal_core.messages import Credentials, Done, Failed, PeerClosed
from areal_core.messages.hub import (
    Driving,
    Failing,
    Finished,
    Forward,
    Forwarded,
    Notice,
    Restart,
    Signaled,
    Stop,
    StopRun,
    TrainersTurn,
    WhoDrives,
)
from areal_core.messages.hub import Process as ProcessNote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.interfaces.launcher import Launcher, ProcessGroup
    from areal_core.messages import Peer
    from areal_core.runs.folder import AttemptFolder, RunFolder

GRACE_S = 20.0
"""For the others to end by themselves when the main processes are done."""
POLL_S = 0.25
IMPATIENCE_S = 1.0
"""A second Ctrl-C within it may be the echo of the first."""
FORWARD_TIMEOUT_S = 60.0
CONNECTIONS = 1 << 16
"""Files that may be open, where the system lets it: each process of the run is a connection."""


class Driver:
    """Processes of a run, wherever a launcher starts them.

    Args:
        launcher: starts them.
        run: the folder of the run.
        on_message: called with what a process says that is not for the driver itself.
        log: shows a line to the user.
        signals: that asked this program to stop before; more are added.
    """

    def __init__(
        self,
        launcher: Launcher,
        run: RunFolder,
        on_message: Callable[[Any], None],
        log: Callable[[str], None],
        signals: list[int] | None = None,
    ) -> None:
        self._launcher, self._run, self._on_message, self._log = launcher, run, on_message, log
        self.credentials = Credentials.create(0)
        self.signals = [] if signals is None else signals
        """Signals that asked this program to stop, in order."""
        self._hub = Hub(
            self.credentials,
            on_message=self._take,
            on_end=self._has_ended,
            on_node=getattr(launcher, "take_node", None),
            on_visitor=self._receive_visitor,
        )
        self._liveness = Liveness(self._run.log_path, log, self._hub.hang_up)
        self._restarts = Restarts()
        self._members = Members(launcher, self._hub, run.log_path, log)
        self._said: list[tuple[Process, Failing]] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._given_up: RunError | None = None
        self._is_impatient = self._is_closing = False
        self._asked_at = 0.0

    async def listen(self) -> str:
        """Be there for processes and visitors; the address."""
        on_failure(self._set_failure)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        await self._hub.listen(await asyncio.to_thread(getattr, self._launcher, "host"))  # it may ask a cluster
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignored
                loop.add_signal_handler(number, self._see_signal, number)
        # A batch system's notice. A script may ignore it for the time before there is anybody to hear it.
        loop.add_signal_handler(signal.SIGUSR1, self._see_signal, signal.SIGUSR1)
        loop.add_signal_handler(
            signal.SIGTSTP, self._log, "a run cannot be suspended: press Ctrl-C to stop it after a checkpoint"
        )
        watch_event_loop(math.inf, self._log)
        return self._hub.address

    def begin(self, attempt: AttemptFolder) -> None:
        """From now on processes of this attempt are let in."""
        self.credentials = Credentials(self.credentials.token, attempt.number)
        self._hub.begin(self.credentials)
        self._members.environment = {
            HUB_VARIABLE: self._hub.address,
            TOKEN_FILE_VARIABLE: str(attempt.token),
            LOGS_VARIABLE: str(self._run.logs),
            **self.credentials.as_environment(),
        }

    async def start(self, groups: Sequence[ProcessGroup], optional: Sequence[ProcessGroup] = ()) -> None:
        """Place groups and start them; see `Members.start`.

        Raises:
            RunError: there is no room, a group cannot be started, or the user has had enough.
        """
        starting = asyncio.ensure_future(self._members.start(groups, optional))
        while not starting.done():
            await asyncio.wait({starting}, timeout=POLL_S)
            if self.signals and not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                raise RunError("stopped while processes were started", exit_code=128 + self.signals[0])
        await starting

    def forget(self, role: str) -> None:
        """The processes of a role have done their part."""
        self._members.forget(role)

    async def watch(self, role: str, update: Callable[[], None], stop_s: float = math.inf) -> int:
        """Wait for the processes of a role; the failure of any other, or its end before, is a failure of all.

        Args:
            role: of those that are waited for. Where the program is signaled, they are told to stop.
            update: called a few times a second.
            stop_s: how long those that are told to stop are waited for.

        Returns:
            0, or `ASKED_TO_STOP`.

        Raises:
            LostError: a process was killed, or its node lost.
            RunError: one failed; says which, where, and why.
        """
        same = [process for process in self._members.essential if process.group.role == role]
        is_stopping, give_up_at, ended_at = False, math.inf, math.inf
        while True:
            self._changed.clear()
            ended = {p: p.ended.result().code for p in self._members.essential if p.ended.done()}
            if any(code not in (0, ASKED_TO_STOP) or process.why for process, code in ended.items()):
                raise await find_cause(self._said, lambda: self._members.essential, self._run.log_path)
            if failure := self._failure or self._given_up:
                raise failure
            if same[0] in ended:
                self._check_finished(same[0])
                return ASKED_TO_STOP if ended[same[0]] else 0
            self._liveness.check(self._hub.processes.values())
            if self._is_impatient:
                first = self.signals[0]
                raise RunError("stopped at once; the last committed checkpoint is kept", exit_code=128 + first)
            if self.signals and not is_stopping:
                is_stopping, give_up_at = True, time.monotonic() + stop_s
                again = f"Ctrl-C again, {IMPATIENCE_S:g} s later or more, stops at once"
                self._log(f"stopping, after a checkpoint where there is something to keep; {again}")
                for process in same:
                    process.stop()
            if time.monotonic() > give_up_at:
                return ASKED_TO_STOP
            if is_stopping and ended:
                ended_at = min(ended_at, time.monotonic())
            if time.monotonic() - ended_at > GRACE_S:  # one had nothing to keep: the others wait for it
                for process in same:
                    self._hub.hang_up(process, "the others have stopped")
            update()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    async def end_others(self, code: int) -> None:
        """The main processes are done: the others end by themselves, or are ended after a while.

        Args:
            code: of the main ones; where they were stopped, they may never have spoken to the others.
        """
        for process in self._members.essential if code else ():
            process.stop()
        waited = [asyncio.shield(process.ended) for process in self._members.essential]
        if waited:
            await asyncio.wait(waited, timeout=GRACE_S)

    async def end_attempt(self, *, keeps: Callable[[ProcessGroup], bool] = lambda _: False) -> None:
        """End all processes, but servers that another attempt can use.

        Args:
            keeps: whether members of a group may stay.
        """
        await self._members.end(keeps)
        self._said, self._given_up = [], None

    async def close(self) -> None:
        """End everything that still runs; safe to call twice."""
        self._is_closing = True
        await self.end_attempt()
        await self._launcher.close()

    def abandon(self) -> None:
        """Close all connections at once, as the kernel does when this program is killed."""
        self._is_closing = True
        for process in self._hub.processes.values():
            if process.peer is not None:
                process.peer.abort()

    def describe(self) -> Driving:
        """How the run is: what each process is doing, where, and when it was heard."""
        notes = {
            process.name: ProcessNote(
                process.group.role,
                process.place.node,
                process.join.pid if process.join else 0,
                process.beat.phase,
                process.silent_s,
                next(iter(process.served.values()), ""),
                process.place.gpus,
            )
            for process in self._hub.processes.values()
        }
        return Driving(socket.gethostname(), os.getpid(), self.credentials.attempt, notes, self._is_closing)

    # What happens.

    def _has_ended(self, process: Process) -> None:
        self._changed.set()
        end = process.ended.result()
        if end.code is None and not process.stopping:
            self._members.note_lost(process)
        if process.is_essential or process.stopping or self._is_closing or (process.has_finished and not end.code):
            return
        said = next((told for who, told in self._said if who is process), None)
        how = process.why or (said.text if said else end.describe())
        pause_s, reason = self._restarts.after(process, said, how)
        if not reason:
            self._log(f"{process.name} {how if process.why or said else end.describe()}: it is restarted")
            self._members.restart(process, pause_s)
            return
        role = process.group.role
        if role == "server":
            self._log(f"{process.name} is not restarted: {reason}")
        self._hub.failed.setdefault(role, {})[process.name] = reason
        if not self._hub.notify_watchers(role) and role != "server" and self._given_up is None:
            hints = [*(said.hints if said else ()), f"its log: {self._run.log_path(process.name)}"]
            self._given_up = RunError(f"{process.name} {reason}", hints=hints, exit_code=said.exit_code if said else 1)

    def _check_finished(self, process: Process) -> None:
        """That a process ends with 0 says nothing: any library may call `os._exit`. It says itself that it is done."""
        if not process.has_finished:
            raise RunError(
                f"{process.name} ended before its work was done, with exit code {process.code}",
                hints=[f"its log: {self._run.log_path(process.name)}"],
            )

    def _take(self, process: Process, message: Any, number: int) -> None:
        match message:
            case Finished():
                process.has_finished = True
            case Failing():
                self._said.append((process, message))
            case Signaled(signaled):
                if process.is_essential:
                    if not self.signals:
                        self._log(f"{process.name} on {process.place.node} was sent {signal.Signals(signaled).name}")
                    self._see_signal(signaled)
                else:
                    process.notify(Stop())
            case Restart(name, why):
                named = next((p for p in self._hub.processes.values() if p.name == name), None)
                if named is not None:
                    self._hub.hang_up(named, f"is stopped: it {why}")
            case TrainersTurn(True):
                self._members.may_share.clear()
                start_task(self._wait_for_loading(process, number), "servers that load")
            case TrainersTurn():
                self._members.may_share.set()
            case Notice(text):
                self._log(f"{process.name}: {text}")
            case _:
                self._on_message(message)

    async def _wait_for_loading(self, process: Process, number: int) -> None:
        """Servers that load their model are waited for: else one that takes long would never come to serve."""
        while any(one.group.shares_gpus and not one.is_ready for one in self._hub.processes.values()):
            await asyncio.sleep(POLL_S)
        process.notify(Done(), -number)

    def _see_signal(self, number: int) -> None:
        """The first asks for a checkpoint. Only a second Ctrl-C ends the run at once: notices and signals of schedulers
        and closing terminals come in twos and threes."""
        if not self.signals:
            self._asked_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > IMPATIENCE_S:
            self._is_impatient = True
        self.signals.append(number)
        self._changed.set()

    def _set_failure(self, name: str, error: BaseException) -> None:
        """Background work of this very program has failed."""
        traceback.print_exception(error)
        self._failure = self._failure or RunError(f"the driver failed: {name}: {type(error).__name__}: {error}")
        self._changed.set()

    async def _receive_visitor(self, peer: Peer) -> None:
        """Somebody who knows the run's token asks something."""
        while True:
            message, number = await peer.receive_request()
            match message:
                case WhoDrives():
                    peer.reply(number, self.describe())
                case StopRun(now):
                    self._is_impatient |= now
                    self._see_signal(signal.SIGTERM)
                    peer.reply(number, Done())
                case Forward(role, request):
                    peer.reply(number, await self._forward(role, request))
                case _:
                    peer.reply(number, Failed(f"the driver is not asked for {type(message).__name__}"))

    async def _forward(self, role: str, request: bytes) -> Forwarded | Failed:
        """The answer of a role to a client's question."""
        asked = next((p for p in self._members.essential if p.group.role == role and not p.ended.done()), None)
        if asked is None or asked.peer is None:
            return Failed(f"the run has no {role} at the moment")
        try:
            answer: Forwarded = await asked.peer.request(Forward(role, request), FORWARD_TIMEOUT_S, "its answer")
        except (RunError, PeerClosed) as error:
            return Failed(error.message, error.hints)
        return answer
