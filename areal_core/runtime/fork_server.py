"""The fork server: imports torch and transformers once, then forks members of this machine from that process.

`ForkServer` is the launcher's end. The other end is a process of its own (`python -m areal_core.runtime.fork_server`),
which is also the guard of all members that it forks. Both speak lines of JSON over the process's standard streams:

    launcher                                                    fork server
                                                   event: preloaded, threads: 1        imports are done
    number: 0, argv: [module, ...], environment: {...}
                                                   event: forked, number: 0, pid: 7    or
                                                   event: failed, number: 0, reason
    number: 0, signal: 9                           sends the signal to the member, if it runs
                                                   event: ended, number: 0, code: 0    nothing is left of the member
    end of the stream                              kills all members and exits

The number of its order stands for a member, and not its pid: the kernel may give the pid to another process between
the end of the member and the end of its orphans.

The preloaded process only imports. It has one thread, because a fork copies only the thread that forks, and locks that
others hold stay locked. It computes nothing with any library: the pools of OpenMP and the CUDA context do not survive
a fork. The launcher checks the number of threads, and forks nothing if there are several.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO, TypeVar

from areal_core.background import start_thread
from areal_core.errors import RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.runtime.guard import SIGNALS, Guard, Guarded
from areal_core.runtime.logs import open_log
from areal_core.runtime.process_tree import adopt_orphans, kill_tree
from areal_core.runtime.rpc import PeerClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Result = TypeVar("_Result")
PRELOADED = (
    "torch",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    "transformers.modeling_utils",
    "safetensors.torch",
    "areal_core.config",
)
"""Modules that take long to import and that most members need."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which transformers imports if it is installed
}
"""Variables that keep libraries from starting threads when they are imported."""
ANSWER_TIMEOUT_S = 300.0
"""Seconds for the imports, which a slow disk delays, and for a fork."""
CLOSE_TIMEOUT_S = 20.0
"""Seconds in which the fork server must end its members, before it is killed with all of them."""
READ_BYTES = 1 << 20
"""Bytes that the fork server reads from its standard input at a time."""


class ForkServer:
    """A fork server that this program has started.

    Its environment is this program's, with the variables that keep libraries from starting threads. `threads` returns
    whether that was enough.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_core.runtime.fork_server"],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._threads: Future[int] = Future()
        self._numbers = itertools.count()
        self._forked: dict[int, Future[ForkedProcess]] = {}
        """Orders without an answer, by number."""
        self._codes: dict[int, Future[int]] = {}
        """Exit codes to come, by number."""
        start_thread(self._read_events, "events of the fork server")

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    async def threads(self) -> int:
        """Return the number of its threads after the imports. With several, it must not fork.

        Raises:
            RunError: the fork server has ended, or its imports take too long.
        """
        return await self._wait_for(self._threads, "imported what members need")

    async def fork(self, argv: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Fork a member.

        Args:
            argv: the module to run, as `python -m` does, and its arguments.
            environment: the whole environment of the member.

        Raises:
            RunError: the fork server has ended, or cannot fork.
        """
        number = next(self._numbers)
        forked = self._forked[number] = Future[ForkedProcess]()
        try:
            self._order(number=number, argv=list(argv), environment=dict(environment))
        except OSError as error:
            raise RunError(f"the fork server is gone: {error}") from None
        return await self._wait_for(forked, f"forked {argv[0]}")

    def send_signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a member. Do nothing if it has ended, or if the fork server has.

        Args:
            number: of the order that has forked the member.
            signal_number: of the signal.
        """
        with contextlib.suppress(OSError):
            self._order(number=number, signal=signal_number)

    def _order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise BrokenPipeError("it was closed")
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()

    async def _wait_for(self, future: Future[_Result], what: str) -> _Result:
        try:
            # Shield the future: the thread that reads events sets its result also if this wait is cancelled.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), ANSWER_TIMEOUT_S)
        except TimeoutError:
            hints = ["without it: launcher.fork_server=false"]
            raise RunError(f"the fork server has not {what} within {ANSWER_TIMEOUT_S:g} s", hints=hints) from None

    def close(self) -> None:
        """End the fork server and all members that it has forked. A second call does nothing."""
        assert self._process.stdin is not None
        if not self._threads.done():  # it still imports, and has forked nothing
            self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()

    def _read_events(self) -> None:
        """Set the results of futures until the fork server has ended; then fail those that are left."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case {"event": "preloaded", "threads": threads}:
                    self._threads.set_result(threads)
                case {"event": "forked", "number": number, "pid": pid}:
                    code = self._codes[number] = Future[int]()
                    member = ForkedProcess(pid, code, partial(self.send_signal, number))
                    self._forked.pop(number).set_result(member)
                case {"event": "failed", "number": number, "reason": reason}:
                    self._forked.pop(number).set_exception(RunError(f"no member can be forked: {reason}"))
                case {"event": "ended", "number": number, "code": exit_code}:
                    self._codes.pop(number).set_result(exit_code)
        message = f"the fork server {describe_exit(self._process.wait())}"
        unanswered: list[Future[Any]] = [self._threads, *self._forked.values(), *self._codes.values()]
        for future in unanswered:
            if not future.done():
                future.set_exception(RunError(message))


class ForkedProcess:
    """A member that the fork server has forked. Looks like an `asyncio.subprocess.Process`.

    Args:
        pid: its process id, for logs. Use `send_signal` to end it: its pid may be another process's already.
        code: its exit code, when nothing is left of it.
        send_signal: sends a signal with this number to the member, if it runs.
    """

    def __init__(self, pid: int, code: Future[int], send_signal: Callable[[int], None]) -> None:
        self.pid = pid
        self.send_signal = send_signal
        self._code = code

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while something is left of it, and -1 if the fork server ended before it."""
        if not self._code.done():
            return None
        return -1 if self._code.exception() is not None else self._code.result()

    async def wait(self) -> int:
        """Wait until nothing is left of it, and return its exit code."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._code))
        except RunError:
            return -1


# The process that forks. It must stay light: what is imported above is imported before everything else.


def main() -> int:
    """Import, then fork members until standard input ends."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    events = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what an import prints is no event
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the driver decides when members end
    adopt_orphans()
    preload()
    _send(events, event="preloaded", threads=len(list(Path("/proc/self/task").iterdir())))
    guard = Guard()
    guard.listen(orders.fileno())
    members: dict[int, Guarded] = {}
    unread = b""
    while True:
        ready, gone = guard.wait()
        for ended in [number for number, member in members.items() if member in gone]:
            _send(events, event="ended", number=ended, code=members.pop(ended).code)
        if orders.fileno() not in ready:
            continue
        data = orders.read(READ_BYTES)
        if not data:
            guard.ignore(orders.fileno())
            guard.end_all()
            return 0
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"number": number, "signal": signal_number}:
                    if number in members:
                        guard.send_signal(members[number], signal_number)
                case {"number": number, "argv": argv, "environment": environment}:
                    try:
                        member = members[number] = _fork(argv, environment, guard, orders, events)
                    except (OSError, PeerClosed) as error:
                        _send(events, event="failed", number=number, reason=str(error))
                    else:
                        _send(events, event="forked", number=number, pid=member.pid)


def preload() -> None:
    """Import what members need, and exempt it from garbage collection, which would copy shared pages in each member."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # transformers is not installed everywhere
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _send(events: TextIO, **event: Any) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, and standard input is about to end
        events.write(f"{json.dumps(event)}\n")
        events.flush()


def _fork(argv: list[str], environment: dict[str, str], guard: Guard, orders: BinaryIO, events: TextIO) -> Guarded:
    """Fork a member and return it.

    Raises:
        OSError, PeerClosed: the hub cannot be reached, or the machine has no room for another process.
    """
    member = Guarded.connect(environment)
    environment |= member.variables()
    if guard.fork(member):
        return member
    os.close(orders.fileno())
    os.close(events.fileno())
    member.connection.detach()
    _run_member(argv, environment, member.log)


def _run_member(argv: list[str], environment: Mapping[str, str], log: Path | None) -> NoReturn:
    """Run a module in the forked process as `python -m` runs it, and exit."""
    code = 1
    try:
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        if log is not None:
            open_log(log)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all members would draw the same numbers
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:  # noqa: BLE001 - Python also ends a program with a traceback
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _exit_code(exit_request: SystemExit) -> int:
    """Return the exit code of a `sys.exit`. As Python does, print an argument that is no number."""
    match exit_request.code:
        case None:
            return 0
        case int(code):
            return code
        case message:
            sys.stderr.write(f"{message}\n")
            return 1


if __name__ == "__main__":
    sys.exit(main())
