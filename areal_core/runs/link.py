"""A process's link to its supervisor: it beats, says what it is doing and why it dies, and asks for things."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
import traceback
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal_core.background import on_failure, start_thread
from areal_core.errors import ArealError, LostError, RunError
from areal_core.interfaces.launcher import Place, ProcessEnd
from areal_core.launchers.supervised import BEAT_S
from areal_core.launchers.wardens import BEAT_VARIABLE, NAME_VARIABLE, SUPERVISOR_VARIABLE
from areal_core.messages import BlockingChannel, ChannelClosed
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import (
    Adopt,
    Alive,
    Announce,
    Ask,
    Dying,
    EndProcess,
    FindPlace,
    Finished,
    ProcessEnded,
    RunProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from areal_core.interfaces.launcher import Needs, ProcessSpecification

ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 60.0
UNLINKED_EXIT_CODE = 76
"""Of a process whose connection to its supervisor has ended."""


class Link:
    """Of this process; its methods may be called from any thread.

    Args:
        channel: to the supervisor.
        name: of this process.
        beat_s: seconds between its beats.

    Attributes:
        host: this node's address, as the supervisor's machine may reach it.
    """

    def __init__(self, channel: BlockingChannel, name: str, beat_s: float = BEAT_S) -> None:
        self.name = name
        self._beat_s = beat_s
        self.host = channel.own_host
        self._channel = channel
        self._phase, self._deadline_s, self._since = "starting", 0.0, time.monotonic()
        self._numbers = itertools.count(1)
        self._replies: dict[int, Future[Any]] = {}
        self._handler: Callable[[Any, int], None] = lambda *_: None
        start_thread(self._listen, "link to the supervisor")

    @classmethod
    def open(cls) -> Link:
        """Connect to the supervisor that this process was started by."""
        address, name = os.environ.pop(SUPERVISOR_VARIABLE), os.environ.pop(NAME_VARIABLE)
        beat_s = float(os.environ.pop(BEAT_VARIABLE, BEAT_S))
        return cls(BlockingChannel.connect(address, CONNECT_TIMEOUT_S, name), name, beat_s)

    @contextmanager
    def phase(self, name: str, deadline_s: float = 0.0) -> Iterator[None]:
        """Say what this process is doing while it is inside.

        Args:
            name: of the phase.
            deadline_s: after which the supervisor counts this process as hanging; 0 is never.
        """
        former = self._phase, self._deadline_s
        self.enter(name, deadline_s)
        try:
            yield
        finally:
            self.enter(*former)

    def enter(self, name: str, deadline_s: float = 0.0) -> None:
        """Say what this process is doing from now on; see `phase`."""
        self._phase, self._deadline_s, self._since = name, deadline_s, time.monotonic()
        self.post(Alive(name, 0.0, deadline_s))

    def post(self, message: Any, number: int = 0) -> None:
        """Say something; nothing happens where nobody listens any more, for then this process is about to end."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message, number)

    def request(self, message: Any) -> Future[Any]:
        """Ask for something; the future brings the reply, or `RunError` where it failed."""
        reply: Future[Any] = Future()
        number = next(self._numbers)
        self._replies[number] = reply
        self.post(message, number)
        return reply

    def announce(self, name: str, value: str) -> None:
        """Let others know something, such as an address."""
        self.post(Announce(name, value))

    def ask(self, name: str, timeout_s: float) -> str:
        """What was announced under a name, or will be within `timeout_s` seconds.

        Raises:
            RunError: nobody announced it in time.
        """
        try:
            with self.phase(f"waiting for {name}"):
                announced: Announce = self.request(Ask(name)).result(timeout_s)
        except TimeoutError:
            raise RunError(
                f"no process of the run announced its {name} within {timeout_s:g} s",
                hints=["a start that takes longer: raise training.phase_timeout_s"],
            ) from None
        return announced.value

    def on_message(self, handler: Callable[[Any, int], None]) -> None:
        """What to do with messages that are no replies; called in a thread of the link."""
        self._handler = handler

    def die(self, error: BaseException) -> int:
        """Say why this process ends; the exit code that it shall end with."""
        if isinstance(error, ArealError):
            kind = isinstance(error, ChannelClosed), isinstance(error, LostError)
            self.post(Dying(error.message, error.hints, error.exit_code, "", *kind))
            return error.exit_code
        told = "".join(traceback.format_exception(error))
        sys.stderr.write(told)
        self.post(Dying(f"{type(error).__name__}: {error}"[:2000], (), 1, told[-20_000:]))
        return 1

    def _listen(self) -> None:
        beat = 0.0
        try:
            while True:
                if (now := time.monotonic()) - beat >= self._beat_s:
                    beat = now
                    self._channel.send(Alive(self._phase, now - self._since, self._deadline_s))
                with contextlib.suppress(TimeoutError):
                    self._take(*self._channel.receive(BEAT_S / 2))
        except ChannelClosed:
            os._exit(UNLINKED_EXIT_CODE)  # whoever supervised this process is gone, or the way there is

    def _take(self, message: Any, number: int) -> None:
        if number >= 0:
            self._handler(message, number)
            return
        reply = self._replies.pop(-number, None)
        if reply is None or not reply.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        if isinstance(message, Failed):
            reply.set_exception(RunError(message.text, hints=message.hints))
        else:
            reply.set_result(message)


class LinkedProcess:
    """A process that this one has asked its supervisor for; a `RunningProcess`."""

    def __init__(self, link: Link, name: str) -> None:
        self.name = name
        self.ended: Future[ProcessEnd] = Future()
        self._link = link

    async def wait(self) -> ProcessEnd:
        """See `RunningProcess.wait`."""
        return await asyncio.shield(asyncio.wrap_future(self.ended))

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        """See `RunningProcess.end`."""
        self._link.post(EndProcess(self.name, grace_s))
        try:
            async with asyncio.timeout(grace_s + ANSWER_TIMEOUT_S):
                return await self.wait()
        except TimeoutError:
            raise RunError(f"{self.name} has not ended {grace_s + ANSWER_TIMEOUT_S:g} s after it was told to") from None


class LinkedProcesses:
    """Starts processes of the run through the supervisor; a `Processes`.

    Args:
        link: of this process, whose name the processes stand beside.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.host = link, link.host
        self._running: dict[str, LinkedProcess] = {}

    async def start(self, specification: ProcessSpecification) -> LinkedProcess:
        """See `Processes.start`."""
        process = self._running[specification.name] = LinkedProcess(self._link, specification.name)
        needs = specification.needs
        asked = RunProcess(
            specification.name,
            specification.role,
            tuple(specification.command),
            specification.environment,
            needs.gpus,
            needs.cores,
            specification.node,
            "" if specification.node else specification.beside or self._link.name,
            specification.port,
            specification.speaks,
        )
        await self._request(asked, specification.name)
        return process

    async def find_place(self, needs: Needs) -> Place:
        """See `Processes.find_place`."""
        found = await self._request(FindPlace(needs.gpus, needs.spare), "a place for a process")
        return Place(found.node, found.address, found.port, found.gpus)

    async def adopt(self, name: str) -> tuple[LinkedProcess, Place] | None:
        """See `Processes.adopt`."""
        process = self._running[name] = LinkedProcess(self._link, name)
        found = await self._request(Adopt(name), f"{name}, if it still runs")
        if found.node:
            return process, Place(found.node, found.address, found.port)
        self._running.pop(name, None)
        return None

    async def _request(self, asked: object, what: str) -> Any:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.wrap_future(self._link.request(asked))
        except TimeoutError:
            raise RunError(f"the supervisor has not answered within {ANSWER_TIMEOUT_S:g} s: {what}") from None

    def hear(self, ended: ProcessEnded) -> None:
        """A process that was asked for has ended."""
        process = self._running.pop(ended.name, None)
        if process is not None:
            process.ended.set_result(ProcessEnd(ended.code, ended.last_words))


def run_role(role: Callable[[Link], int]) -> int:
    """Run a process of a run to its end; its exit code.

    Args:
        role: the work; what it raises is said to the supervisor, as is what background work raises.
    """
    link = Link.open()
    on_failure(lambda _, error: _end_now(link, error))
    try:
        code = role(link)
    except BaseException as error:  # noqa: BLE001 - whatever it is, also `sys.exit`, the supervisor must hear of it
        return link.die(error)
    link.post(Finished(code))
    return code


def _end_now(link: Link, error: BaseException) -> None:
    code = link.die(error)
    sys.stderr.flush()
    os._exit(code)
