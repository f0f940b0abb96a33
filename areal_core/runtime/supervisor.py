"""The supervisor of a run's processes: it starts them, passes on their messages, and acts when one ends.

    start ──> joined ──> ready ──> ended ──┬──> restarted
                                           ├──> given up
                                           └──> the attempt or the run ends

    move            made by
    --------------  ------------------------------------------------------------------------------------------------
    start           `start` -> `Members.start`: places groups, adds a `Process` to the hub, calls the launcher
    joined          `Hub._serve_member`: the process has connected and sent `Join`
    ready           `Hub._receive`: the process has announced an address
    ended           `Hub.remove`: its connection is closed, the hub has refused it, or its guard has reported its exit
                    before it could join; `Members._follow`: it has never joined; `Members.end`: the attempt is over
    restarted       `_on_end` -> `RestartPolicy.after_end` -> `Members.restart`
    given up        `_on_end` -> `Hub.give_up`: the processes that watch its role decide
    attempt ends    `watch` raises the cause; its caller calls `end_attempt`, and `start` again or `close`

    loop                          waits for
    ----------------------------  ----------------------------------------------------------------------------------
    `watch`                       the end of a process, a signal, or 0.25 s: then it checks ends, liveness and stops
    `Hub._serve`, per connection  a message of the process, or the end of its connection
    `_serve_client`, per client   a question of `areal status`, `areal stop` or `areal audit`
    `Members._follow`, per group  the launcher's report that its members are over
    `Members._restart`            the pause before a restart
    `Members._start_when_there_is_room`, per optional group: room for it
    `_grant_trainers_turn`        servers that load their model: the trainer's turn on shared GPUs begins afterwards

`Hub.terminate` is called by `watch` (a replaceable process hangs; a process outlives a stop), by `_on_message` (another
process asks for the restart of this one) and by `Members.end` (the attempt is over).

The supervisor knows no roles: `driver/groups.py` says which processes a run has, and plugins run processes of their own
in the same way. `restart_policy.py` decides what follows from an end.
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
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import AcceptsNodes, describe_exit
from areal_core.runtime.cause import find_cause
from areal_core.runtime.environment import HUB_VARIABLE, LOGS_VARIABLE, TOKEN_FILE_VARIABLE
from areal_core.runtime.hub import Hub, Process
from areal_core.runtime.liveness import Liveness
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.members import Members
from areal_core.runtime.messages import (
    ColocatedTraining,
    Finished,
    Forward,
    Forwarded,
    LogLine,
    ProcessFailed,
    ProcessStatus,
    RestartMember,
    RunStatus,
    Signaled,
    StatusRequest,
    Stop,
    StopRun,
)
from areal_core.runtime.restart_policy import Action, RestartPolicy, ends_attempt
from areal_core.runtime.rpc import Credentials, Done, Failed, PeerClosed
from areal_core.waiting import polls_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.interfaces.launcher import Launcher, ProcessGroup
    from areal_core.runtime.folder import AttemptFolder, RunFolder
    from areal_core.runtime.rpc import Peer

GRACE_S = 20.0
"""Seconds for the other processes to end after the first one, before they are terminated."""
POLL_S = 0.25
"""Seconds between two checks of `watch`."""
SECOND_CTRL_C_S = 1.0
"""A second Ctrl-C within these seconds may be an echo of the first, and is ignored."""
FORWARD_TIMEOUT_S = 60.0
"""Seconds for a process to answer the question of a client."""
OPEN_FILES = 1 << 16
"""Limit on open files that the supervisor asks the system for: each process of the run is a connection."""


class Supervisor:
    """Runs the processes of a run, wherever a launcher starts them.

    Call `listen` and `admit`, then `start` and `watch` for each step of the run, and `close` at the end.

    Args:
        launcher: starts them.
        run: the folder of the run.
        on_message: called with each message that is not for the supervisor.
        log: shows a line to the user.
        signals: signals that this program received before. More are added.

    Attributes:
        credentials: of the run and its current attempt.
        signals: signals that asked this program to stop, in order.
    """

    def __init__(
        self,
        launcher: Launcher,
        run: RunFolder,
        on_message: Callable[[Any], None],
        log: Callable[[str], None],
        signals: list[int] | None = None,
    ) -> None:
        self._launcher = launcher
        self._run = run
        self._forward_message = on_message
        self._log = log
        self.credentials = Credentials.create(0)
        self.signals = [] if signals is None else signals
        self._hub = Hub(
            self.credentials,
            on_message=self._on_message,
            on_end=self._on_end,
            on_node=launcher.accept_node if isinstance(launcher, AcceptsNodes) else None,
            on_client=self._serve_client,
        )
        self._members = Members(launcher, self._hub, run.log_path, log)
        self._liveness = Liveness(log)
        self._policy = RestartPolicy()
        self._reports: list[tuple[Process, ProcessFailed]] = []
        self._fatal: RunError | None = None
        self._background_failure: RunError | None = None
        self._changed = asyncio.Event()
        self._stop_asked_at = 0.0
        self._must_stop_now = False
        self._is_closing = False

    # What the driver calls, in this order.

    async def listen(self) -> str:
        """Start listening for processes and clients, and handling signals. Return the hub's address."""
        on_failure(self._on_background_failure)
        _raise_limit_on_open_files()
        host = await asyncio.to_thread(getattr, self._launcher, "host")  # a launcher may ask its cluster for it
        await self._hub.listen(host)
        self._handle_signals()
        watch_event_loop(math.inf, self._log)
        return self._hub.address

    def admit(self, attempt: AttemptFolder) -> None:
        """Begin an attempt: from now on, only its processes can join."""
        self.credentials = Credentials(self.credentials.token, attempt.number)
        self._hub.admit(self.credentials)
        self._policy.begin_attempt()
        self._members.environment = {
            HUB_VARIABLE: self._hub.address,
            TOKEN_FILE_VARIABLE: str(attempt.token),
            LOGS_VARIABLE: str(self._run.logs),
            **self.credentials.as_environment(),
        }

    async def start(self, groups: Sequence[ProcessGroup], optional: Sequence[ProcessGroup] = ()) -> None:
        """Place groups and start them. A signal cancels the start.

        Args:
            groups: must have room.
            optional: each is started as soon as there is room for it.

        Raises:
            RunError: there is no room, a group cannot be started, or a signal has come.
        """
        starting = asyncio.ensure_future(self._members.start(groups, optional))
        while not starting.done():
            await asyncio.wait({starting}, timeout=POLL_S)
            if self.signals and not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                raise RunError("stopped while processes were started", exit_code=128 + self.signals[0])
        await starting

    async def watch(self, role: str, update: Callable[[], None], stop_timeout_s: float = math.inf) -> int:
        """Wait until the first process of a role has finished. Any failure of an essential process ends the wait.

        When a signal comes, the processes of the role are asked to stop.

        Args:
            role: of the processes to wait for.
            update: called a few times a second.
            stop_timeout_s: seconds for the processes to stop after a signal.

        Returns:
            0, or `ASKED_TO_STOP`.

        Raises:
            LostError: a process was killed, hung, or was lost with its node.
            RunError: a process failed. The message names it, its node and the cause.
        """
        watched = [process for process in self._members.essential if process.group.role == role]
        is_stopping = False
        stop_deadline = grace_deadline = math.inf
        while True:
            self._changed.clear()
            await self._raise_failures()
            for process in watched:
                self._check_has_finished(process)
            if watched[0].ended.done():
                return ASKED_TO_STOP if watched[0].ended.result().code == ASKED_TO_STOP else 0
            self._end_hanging_processes()
            self._raise_if_stopped_now()
            now = time.monotonic()
            if self.signals and not is_stopping:
                is_stopping = True
                stop_deadline = now + stop_timeout_s
                self._ask_to_stop(watched)
            if now > stop_deadline:
                return ASKED_TO_STOP
            if is_stopping and any(process.ended.done() for process in self._members.essential):
                grace_deadline = min(grace_deadline, now + GRACE_S)
            if now > grace_deadline:  # a process that had nothing to keep has ended, and the others wait for it
                for process in watched:
                    self._hub.terminate(process, "the others have stopped")
            update()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    def mark_done(self, role: str) -> None:
        """Let the processes of a role no longer count, because their work is done."""
        self._members.mark_done(role)

    async def end_others(self, code: int) -> None:
        """Wait up to `GRACE_S` seconds for the other essential processes, which end when the watched ones have ended.

        Args:
            code: of the watched processes. If they were stopped, they may never have contacted the others, so that
                these are asked to stop as well.
        """
        if code:
            for process in self._members.essential:
                process.stop()
        ends = [asyncio.shield(process.ended) for process in self._members.essential]
        if ends:
            await asyncio.wait(ends, timeout=GRACE_S)

    async def end_attempt(self, *, keeps: Callable[[ProcessGroup], bool] = lambda _: False) -> None:
        """End all processes, except servers that another attempt can use.

        Args:
            keeps: returns whether the members of a group may stay.
        """
        await self._members.end(keeps)
        self._reports = []
        self._fatal = None

    async def close(self) -> None:
        """End everything that still runs. A second call does nothing."""
        self._is_closing = True
        await self.end_attempt()
        await self._launcher.close()

    def abandon(self) -> None:
        """Close all connections immediately, as the kernel does when this program is killed."""
        self._is_closing = True
        for process in self._hub.processes.values():
            if process.peer is not None:
                process.peer.abort()

    def describe(self) -> RunStatus:
        """Return the status of the run: what each process does, where, and how long it has been silent."""
        statuses = {
            process.name: ProcessStatus(
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
        return RunStatus(socket.gethostname(), os.getpid(), self.credentials.attempt, statuses, self._is_closing)

    # The checks of `watch`.

    async def _raise_failures(self) -> None:
        if any(ends_attempt(process) for process in self._members.essential):
            raise await find_cause(self._reports, lambda: self._members.essential)
        failure = self._background_failure or self._fatal
        if failure is not None:
            raise failure

    def _check_has_finished(self, process: Process) -> None:
        """Raise `RunError` if a process has ended without reporting that its work is done.

        Exit code 0 is not enough, because any library may call `os._exit`.
        """
        if process.ended.done() and not process.has_finished:
            raise RunError(
                f"{process.name} ended before its work was done, with exit code {process.code}",
                hints=[process.log_hint],
            )

    def _end_hanging_processes(self) -> None:
        for process, reason in self._liveness.find_hanging(self._hub.processes.values()):
            if self._policy.after_hang(process) is Action.TERMINATE:
                self._hub.terminate(process, reason)
            else:
                hints = [process.log_hint, "on a slow machine, raise training.phase_timeout_s"]
                raise LostError(f"{process.name} {reason}", hints=hints)

    def _raise_if_stopped_now(self) -> None:
        if self._must_stop_now:
            message = "stopped immediately; the last committed checkpoint is kept"
            raise RunError(message, exit_code=128 + self.signals[0])

    def _ask_to_stop(self, processes: Sequence[Process]) -> None:
        self._log(
            "stopping, after a checkpoint where there is something to keep; "
            f"Ctrl-C again, {SECOND_CTRL_C_S:g} s later or more, stops immediately"
        )
        for process in processes:
            process.stop()

    # Events: the end of a process, a message, a signal, a failure in this program, a client.

    def _on_end(self, process: Process) -> None:
        self._changed.set()
        end = process.ended.result()
        if end.code is None and not process.is_stopping:
            self._members.avoid_node(process.place.node)
        if self._is_closing:
            return
        failure = next((failure for reporter, failure in self._reports if reporter is process), None)
        is_watched = self._hub.is_watched(process.group.role)
        decision = self._policy.after_end(process, failure, is_watched=is_watched)
        match decision.action:
            case Action.RESTART:
                self._log_restart(process, failure)
                self._members.restart(process, decision.pause_s)
            case Action.GIVE_UP:
                self._log(f"{process.name} is not restarted: {decision.reason}")
                self._hub.give_up(process, decision.reason)
            case Action.END_RUN if self._fatal is None:
                self._fatal = RunError(
                    f"{process.name} {decision.reason}",
                    hints=[*(failure.hints if failure is not None else ()), process.log_hint],
                    exit_code=failure.exit_code if failure is not None else 1,
                )

    def _log_restart(self, process: Process, failure: ProcessFailed | None) -> None:
        end = process.ended.result()
        cause = process.end_reason or (failure.text if failure is not None else "")
        self._log(f"{process.name} {cause or describe_exit(end.code)}: it is restarted")
        if end.last_words and not cause:
            self._log(f"the end of the log of {process.name}:\n{end.last_words}")

    def _on_message(self, process: Process, message: Any, number: int) -> None:
        match message:
            case Finished():
                process.has_finished = True
            case ProcessFailed():
                self._reports.append((process, message))
            case Signaled(signaled):
                self._on_signaled_process(process, signaled)
            case RestartMember(name, reason):
                named = next((other for other in self._hub.processes.values() if other.name == name), None)
                if named is not None:
                    self._hub.terminate(named, f"is stopped: it {reason}")
            case ColocatedTraining(is_active=True):
                self._members.may_use_shared_gpus.clear()
                start_task(self._grant_trainers_turn(process, number), "servers that load")
            case ColocatedTraining():
                self._members.may_use_shared_gpus.set()
            case LogLine(text):
                self._log(f"{process.name}: {text}")
            case _:
                self._forward_message(message)

    def _on_signaled_process(self, process: Process, number: int) -> None:
        """Handle a signal that a member has received: stop the run, or only the member if it is replaceable."""
        if not process.is_essential:
            process.notify(Stop())
            return
        if not self.signals:
            self._log(f"{process.name} on {process.place.node} was sent {signal.Signals(number).name}")
        self._on_signal(number)

    async def _grant_trainers_turn(self, process: Process, number: int) -> None:
        """Answer when no server loads its model: one that loads for long would otherwise never get to serve."""
        async for _ in polls_async(POLL_S):
            processes = self._hub.processes.values()
            if all(other.is_ready for other in processes if other.group.shares_gpus):
                break
        process.notify(Done(), -number)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` has SIGHUP ignored
                loop.add_signal_handler(number, self._on_signal, number)
        # Batch systems announce the end of a job with SIGUSR1. Job scripts ignore it until this program handles it.
        loop.add_signal_handler(signal.SIGUSR1, self._on_signal, signal.SIGUSR1)
        loop.add_signal_handler(
            signal.SIGTSTP, self._log, "a run cannot be suspended: press Ctrl-C to stop it after a checkpoint"
        )

    def _on_signal(self, number: int) -> None:
        """The first signal asks for a checkpoint. Only a second Ctrl-C ends the run immediately.

        Schedulers and closing terminals send several signals, one after another.
        """
        if not self.signals:
            self._stop_asked_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._stop_asked_at > SECOND_CTRL_C_S:
            self._must_stop_now = True
        self.signals.append(number)
        self._changed.set()

    def _on_background_failure(self, name: str, error: BaseException) -> None:
        """Background work of this program has failed: the run ends with that cause."""
        traceback.print_exception(error)
        if self._background_failure is None:
            message = f"the driver failed: {name}: {type(error).__name__}: {error}"
            self._background_failure = RunError(message)
        self._changed.set()

    async def _serve_client(self, peer: Peer) -> None:
        """Answer the questions of a client that has the run's token."""
        while True:
            message, number = await peer.receive_request()
            match message:
                case StatusRequest():
                    peer.reply(number, self.describe())
                case StopRun(now):
                    self._must_stop_now |= now
                    self._on_signal(signal.SIGTERM)
                    peer.reply(number, Done())
                case Forward(role, request):
                    peer.reply(number, await self._forward(role, request))
                case _:
                    peer.reply(number, Failed(f"the driver is not asked for {type(message).__name__}"))

    async def _forward(self, role: str, request: bytes) -> Forwarded | Failed:
        """Return the answer of a role to a client's question."""
        running = [process for process in self._members.essential if not process.ended.done()]
        peer = next((process.peer for process in running if process.group.role == role), None)
        if peer is None:
            return Failed(f"the run has no {role} at the moment")
        try:
            answer: Forwarded = await peer.request(Forward(role, request), FORWARD_TIMEOUT_S, "its answer")
        except (RunError, PeerClosed) as error:
            return Failed(error.message, error.hints)
        return answer


def _raise_limit_on_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
