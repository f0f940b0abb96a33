"""The supervisor of processes: starts them through wardens, passes on what they say, and knows why one ended.

It knows no roles: `execution` says which processes a run has; plugins run processes of their own in the same way.
"""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from areal_core.background import on_failure, start_task, watch_event_loop
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import EndMeans, Needs, ProcessEnd, ProcessSpecification
from areal_core.launchers.wardens import Wardens
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import (
    Adopt,
    Announce,
    Ask,
    Done,
    Dying,
    EndProcess,
    FindPlace,
    Finished,
    Forward,
    Forwarded,
    Notice,
    Owner,
    ProcessEnded,
    RunProcess,
    StopRun,
    WhoOwns,
)
from areal_core.runs.cause import CAUSE_S, find_cause
from areal_core.runs.silence import Silences
from areal_core.runs.standing import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.launcher import Launcher
    from areal_core.launchers.supervised import Node, SupervisedProcess
    from areal_core.messages import Channel, Credentials

INTERRUPTED_EXIT_CODE = 75
"""Of a trainer that was asked to stop and has committed a checkpoint."""
GRACE_S = 20.0
POLL_S = 0.25
IMPATIENCE_S = 1.0
"""A second Ctrl-C within it may be the echo of the first."""
FORWARD_TIMEOUT_S = 60.0
CONNECTIONS = 1 << 16
"""Files that may be open, where the system lets it: each node and each process of areal's own is a connection."""


class Supervisor:
    """Processes on the nodes that a launcher brings.

    Args:
        launcher: brings the nodes.
        credentials: of the run.
        log: the file for the output of a process, by its name.
        hear: called with what a process says that is not for the supervisor itself.
        say: shows a line to the user.
        signals: that asked this program to stop before; more are added.
    """

    def __init__(
        self,
        launcher: Launcher,
        credentials: Credentials,
        log: Callable[[str], Path],
        hear: Callable[[SupervisedProcess, Any], None],
        say: Callable[[str], None],
        signals: list[int] | None = None,
    ) -> None:
        self._launcher = launcher
        self._log = log
        self._hear = hear
        self._say = say
        self._wardens = Wardens(
            credentials,
            on_message=self._take,
            on_end=self._has_ended,
            on_notice=self._was_noticed,
            on_visitor=self._receive_visitor,
        )
        self._forget_all()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_impatient = False
        self._asked_at = 0.0
        self.signals = [] if signals is None else signals
        """Signals that asked this program to stop, in order."""

    def _forget_all(self) -> None:
        """What processes have said."""
        self._announced: dict[str, str] = {}
        self._asking: list[tuple[SupervisedProcess, str, int]] = []
        self._dying: list[tuple[SupervisedProcess, Dying]] = []
        self._silences = Silences(self._log, self._say)

    async def begin_epoch(self, credentials: Credentials, kept_role: str) -> bool:
        """End all processes but those of one role, which are adopted later; False where that is not known for sure."""
        try:
            await self._wardens.begin_epoch(credentials, lambda process: process.specification.role == kept_role)
        except LostError:
            return False
        self._forget_all()
        return True

    def give_up_nodes(self) -> bool:
        """Whether some nodes have gone; then the next epoch brings all anew, for the others are not enough."""
        self._wardens.has_lost |= self._wardens.has_gone
        return self._wardens.has_gone

    async def listen(self) -> str:
        """Be there for wardens and visitors; the address."""
        on_failure(self._set_failure)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignored
                loop.add_signal_handler(number, self._see_signal, number)
        # A batch system's notice. A script may ignore it for the time before there is anybody to hear it.
        loop.add_signal_handler(signal.SIGUSR1, self._see_signal, signal.SIGUSR1)
        loop.add_signal_handler(
            signal.SIGTSTP, self._say, "a run cannot be suspended, its processes would end: Ctrl-C stops it in order"
        )
        watch_event_loop(math.inf, self._say)
        await self._wardens.listen(await asyncio.to_thread(getattr, self._launcher, "host"))  # it may ask a cluster
        return self._wardens.address

    async def bring_nodes(self, folder: Path) -> None:
        """Have the launcher bring its nodes, which must see the run's folder; see `Wardens.bring`."""
        bringing = asyncio.ensure_future(self._wardens.bring(self._launcher, self._say, folder))
        while not bringing.done():
            await asyncio.wait({bringing}, timeout=POLL_S)
            if self.signals:
                bringing.cancel()
                raise RunError("stopped while nodes were brought", exit_code=128 + self.signals[0])
        await bringing

    def spread(self, count: int, gpus: Sequence[int] | None) -> list[Node]:
        """The node of each of `count` ranks; see `Nodes.spread`."""
        return [self._wardens.nodes[name] for name in self._wardens.spread(count, gpus)]

    def gpus_on(self, node: Node, gpus: Sequence[int] | None) -> tuple[int, ...] | None:
        """Those of some GPUs that a node has; None where none are named."""
        return self._wardens.gpus_on(node, gpus)

    def require_gpus(self, count: int, named: Sequence[int]) -> None:
        """Refuse nodes with another number of GPUs than they were counted with; one that does not say is believed.

        Args:
            count: of each node.
            named: GPUs of the run; nodes that have none of them may have any number.

        Raises:
            RunError: there is one.
        """
        nodes = self._wardens.nodes
        used = [node for node in nodes.values() if node.ready.gpus and self.gpus_on(node, named)]
        others = {node.name: node.ready.gpus for node in used}
        if len(nodes) > 1 and (wrong := {name: has for name, has in others.items() if has != count}):
            told = ", ".join(f"{name} has {has}" for name, has in sorted(wrong.items()))
            raise RunError(
                f"GPUs were counted with launcher.gpus_per_node={count}, and {told}",
                hints=["correct it, or, where nodes differ, set it to null and name GPUs by number in placement"],
            )

    @property
    def node_count(self) -> int:
        """How many nodes there are."""
        return len(self._wardens.nodes)

    def start(self, specification: ProcessSpecification) -> SupervisedProcess:
        """Start a process; returns at once."""
        return self._wardens.start(specification, self._log(specification.name))

    def forget(self, process: SupervisedProcess) -> None:
        """A process has done its part."""
        del self._wardens.processes[process.name]

    async def watch(self, main: SupervisedProcess, update: Callable[[], None]) -> int:
        """Wait for a process; the failure of any other, or its end before this one's, is a failure of all.

        Args:
            main: what is waited for. Where the program is signalled, all processes of its role are told to stop; one
                that dies of it, because it was not yet ready to listen, has stopped as well.
            update: called a few times a second.

        Returns:
            0 or `INTERRUPTED_EXIT_CODE`.

        Raises:
            LostError: a process was killed, or its node lost.
            RunError: one failed; says which, where, and why.
        """
        is_passed_on = False
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            ended = {process: process.ended.result().code for process in self._essential() if process.ended.done()}
            stopped = (0, INTERRUPTED_EXIT_CODE, *((-signal.SIGTERM, -signal.SIGKILL) if is_passed_on else ()))
            if any(code not in stopped for code in ended.values()):
                raise await find_cause(self._dying, self._essential, self._log)
            if main in ended:
                await self._check_finished(main, ended[main])
                return ended[main] and INTERRUPTED_EXIT_CODE
            self._silences.check(self._wardens.processes.values(), self._wardens.nodes.values())
            if self._is_impatient:
                first = self.signals[0]
                raise RunError("stopped at once; the last committed checkpoint is kept", exit_code=128 + first)
            same = [p for p in self._essential() if p.specification.role == main.specification.role]
            if self.signals and not is_passed_on:
                is_passed_on = True
                again = f"Ctrl-C again, {IMPATIENCE_S:g} s later or more, stops at once"
                self._say(f"stopping, after a checkpoint where there is something to keep; {again}")
                for process in same:
                    process.signal(signal.SIGTERM)
                    if process.specification.role == "preparer":  # nothing of half a model is kept
                        process.node.post(EndProcess(process.name, IMPATIENCE_S))
            if is_passed_on and any(ended.get(process, 0) < 0 for process in same):
                for process in same:  # one was not ready to listen: the others would wait for it
                    process.node.post(EndProcess(process.name, 0.0))
            update()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def end_others(self) -> None:
        """The main process is done: the others end by themselves, or are ended after a while."""
        others = [process.wait() for process in self._essential()]
        if others:
            await asyncio.wait([asyncio.ensure_future(other) for other in others], timeout=GRACE_S)

    async def close(self) -> None:
        """End everything that still runs, confirmed by the launcher; safe to call twice."""
        await self._wardens.close()
        await asyncio.to_thread(self._launcher.close)

    @property
    def owner(self) -> Owner:
        """How the run is: what each process is doing, where, and when it was heard."""
        return describe(self._wardens)

    def _essential(self) -> list[SupervisedProcess]:
        """Processes whose end is the end of all."""
        return [process for process in self._wardens.processes.values() if process.is_essential]

    async def _check_finished(self, process: SupervisedProcess, code: int) -> None:
        """That a process ends with 0 says nothing: any library may call `os._exit`. It says itself that it is done."""
        deadline = time.monotonic() + CAUSE_S
        while not process.has_finished and code >= 0:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{process.name} ended with exit code {code} before its work was done: something in it ended it",
                    hints=[f"its log: {self._log(process.name)}"],
                )
            await asyncio.sleep(0.02)  # its word and its end come by different ways

    def _take(self, process: SupervisedProcess, message: Any, number: int) -> None:
        match message:
            case Finished():
                process.has_finished = True
            case Dying() if process in self._essential():
                self._dying.append((process, message))
            case Announce(name, value):
                self._announced[name] = value
                waiting, self._asking = self._asking, []
                for asker, wanted, request in waiting:
                    self._take(asker, Ask(wanted), request)
            case Ask(name) if name in self._announced:
                _reply(process, number, Announce(name, self._announced[name]))
            case Ask(name):
                self._asking.append((process, name, number))
            case RunProcess():
                self._run_for(process, message, number)
            case EndProcess(name, grace_s):
                if asked := self._wardens.processes.get(name):
                    asked.node.post(EndProcess(name, grace_s))
            case Adopt() | FindPlace():
                start_task(self._find(process, message, number), f"a place for {process.name}")
            case Notice(text) | Dying(text):
                self._say(f"{process.name}: {text}")
            case _:
                self._hear(process, message)

    async def _find(self, asker: SupervisedProcess, asked: Adopt | FindPlace, number: int) -> None:
        """Answer where a process is, or can be."""
        try:
            if isinstance(asked, Adopt):
                found = self._wardens.adopt(asker.name, asked.name)
            else:
                found = await self._wardens.find_place(asked.gpus, asked.spare)
            _reply(asker, number, found)
        except RunError as error:
            _reply(asker, number, Failed(error.message, error.hints))

    def _run_for(self, owner: SupervisedProcess, asked: RunProcess, number: int) -> None:
        specification = ProcessSpecification(
            asked.name,
            asked.role,
            asked.command,
            asked.environment,
            Needs(asked.cores, asked.gpus),
            asked.node,
            asked.beside,
            EndMeans.REPLACED,
            asked.speaks,
            asked.port,
        )
        try:
            self._wardens.start(specification, self._log(asked.name), owner.name)
        except RunError as error:
            _reply(owner, number, Failed(error.message, error.hints))
        else:
            _reply(owner, number, Done())

    def _has_ended(self, process: SupervisedProcess, end: ProcessEnd) -> None:
        owner = self._wardens.processes.get(process.owner)
        if owner is not None:
            owner.post(ProcessEnded(process.name, end.code, end.last_words))
        self._changed.set()

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
        self._failure = self._failure or RunError(f"the supervisor failed: {name}: {type(error).__name__}: {error}")
        self._changed.set()

    def _was_noticed(self, node: Node, number: int) -> None:
        """The run stops in order where it cannot do without the node, and is about to stop anyway, or has not begun."""
        self._say(f"the node {node.name} is about to be taken away ({signal.Signals(number).name})")
        essential = self._essential()
        if self.signals or not essential or any(p.node is node and not p.ended.done() for p in essential):
            self._see_signal(number)
        else:
            self._wardens.let_go(node)

    async def _receive_visitor(self, channel: Channel) -> None:
        """Somebody who knows the run's token asks something."""
        while True:
            message, number = await channel.receive_request()
            match message:
                case WhoOwns():
                    channel.reply(number, self.owner)
                case StopRun(now):
                    self._is_impatient |= now
                    self._see_signal(signal.SIGTERM)
                    channel.reply(number, Done())
                case Forward(role, request):
                    channel.reply(number, await self._forward(role, request))
                case _:
                    channel.reply(number, Failed(f"the supervisor is not asked for {type(message).__name__}"))

    async def _forward(self, role: str, request: bytes) -> Forwarded | Failed:
        """The answer of a role to a visitor's question."""
        asked = next((p for p in self._essential() if p.specification.role == role and not p.ended.done()), None)
        if asked is None or asked.channel is None:
            return Failed(f"the run has no {role} now")
        try:
            answer: Forwarded = await asked.channel.request(Forward(role, request), FORWARD_TIMEOUT_S, "its answer")
        except RunError as error:
            return Failed(error.message, error.hints)
        return answer


def _reply(process: SupervisedProcess, number: int, message: Any) -> None:
    if process.channel is not None:
        process.channel.reply(number, message)


def role_process(
    name: str, role: str, run_dir: Path, environment: Mapping[str, str] | None = None, needs: Needs | None = None
) -> ProcessSpecification:
    """A process that plays a role of areal's own: `python -m areal_core.runs ROLE RUN_DIR`."""
    command: Sequence[str] = [sys.executable, "-m", "areal_core.runs", role, str(run_dir)]
    return ProcessSpecification(name, role, command, environment or {}, needs or Needs(), speaks=True)
