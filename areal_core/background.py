"""Starts background work: tasks of the event loop, threads, and queues of calls. Other modules only wrap what they
await themselves (`asyncio.ensure_future`).

Work that ends with an exception ends the process with that cause. Nothing is restarted or ignored here: work that can
survive an error handles it.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Handler = Callable[[str, BaseException], None]

_Result = TypeVar("_Result")
TICK_S = 0.5
LOGGED_AFTER_S = 5.0
"""Seconds that an event loop may block before a warning is logged."""
SHOWN_FRAMES = 6
OTHERS_HOLD = "functions in threads hold the interpreter; make clients once and derive them: client.with_options(...)"
"""Advice if the event loop only waits for a new thread to start: threads of user code hold the interpreter."""


def start_task(work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
    """Run a coroutine as a task of the running event loop.

    Args:
        work: an exception that it raises ends the process; being cancelled does not.
        name: what the work does, for the error message.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import start_task
        >>> async def main():
        ...     task = start_task(asyncio.sleep(0.01, result=42), "loading the model")
        ...     return await task
        >>> asyncio.run(main())
        42
    """
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(lambda done: _task_ended(done, name))
    return task


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Run a function in a thread that does not keep the process alive.

    Args:
        work: an exception that it raises ends the process.
        name: name of the thread, which also describes the work in the error message.

    Example:
        >>> from areal_core.processes import start_thread
        >>> loaded = []
        >>> start_thread(lambda: loaded.append("model"), "loading the model").join()
        >>> loaded
        ['model']
    """

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - any exception must be reported
            _handler(name, error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class BackgroundQueue:
    """Makes calls one after another in a thread of its own, so that a call which blocks delays no other work.

    The queue is bounded: when it is full, it drops its oldest call. It reports how many it has dropped before it makes
    the next call, in its own thread.

    Args:
        name: of the thread.
        size: calls that may wait.
        report_dropped: called with the number of calls that were dropped since the last report.
    """

    def __init__(self, name: str, size: int, report_dropped: Callable[[int], None]) -> None:
        self._size = size
        self._report_dropped = report_dropped
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._dropped = 0
        self._call_began: float | None = None
        self._is_closed = False
        start_thread(self._run, name)

    def __len__(self) -> int:
        """Return the number of waiting calls, without the running one."""
        return len(self._calls)

    @property
    def blocked_s(self) -> float:
        """Seconds since the running call began; 0 if none runs."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def put(self, call: Callable[[], None]) -> int:
        """Queue a call and return immediately. A closed queue ignores it.

        Args:
            call: handles its own exceptions; an exception that it raises ends the process, as in all background work.

        Returns:
            How many calls were dropped since the last report, for room for this one and those before it.
        """
        with self._changed:
            if self._is_closed:
                return 0
            if len(self._calls) == self._size:
                self._calls.popleft()
                self._dropped += 1
            self._calls.append(call)
            self._changed.notify_all()
            return self._dropped

    def close(self, deadline: float) -> bool:
        """Take no more calls, and wait until those in the queue have been made.

        Args:
            deadline: time of `time.monotonic()` at which the wait ends. The thread continues after it.

        Returns:
            Whether all calls were made by then.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            remaining_s = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._call_began is None and not self._calls, remaining_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._call_began = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._calls or self._is_closed)
                if not self._calls:
                    return
                call = self._calls.popleft()
                dropped, self._dropped = self._dropped, 0
                self._call_began = time.monotonic()
            if dropped:
                self._report_dropped(dropped)
            call()


def on_failure(handler: Handler) -> Handler:
    """Set the function that handles failed background work, for a program that must not end with it.

    Args:
        handler: called with the name of the work and its exception, in the thread of the work. The default prints
            them and interrupts the main thread.

    Returns:
        The handler that it replaces.

    Example:
        >>> from areal_core.processes import on_failure, start_thread
        >>> failures = []
        >>> former = on_failure(lambda name, error: failures.append((name, error)))
        >>> start_thread(lambda: 1 / 0, "counting").join()
        >>> _ = on_failure(former)
        >>> failures
        [('counting', ZeroDivisionError('division by zero'))]
    """
    global _handler
    former, _handler = _handler, handler
    return former


def watch_event_loop(limit_s: float, log: Callable[[str], None]) -> None:
    """Log the stack of a call that blocks the running event loop. A thread watches the loop until it is closed.

    Args:
        limit_s: seconds of blocking that end the process, as failed background work with a `RunError`.
        log: called in that thread with a message.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import watch_event_loop
        >>> async def main():
        ...     watch_event_loop(60, print)
        ...     await asyncio.sleep(0.01)  # the work of the process; none of it blocks
        ...     print("done")
        >>> asyncio.run(main())
        done
    """
    beats, loop_thread, loop = [0], threading.get_ident(), asyncio.get_running_loop()

    async def beat() -> None:
        while True:
            beats[0] += 1
            await asyncio.sleep(TICK_S / 2)

    def watch() -> None:
        seen, blocked_s, is_reported = 0, 0.0, False
        while True:
            time.sleep(TICK_S)
            if loop.is_closed():
                return
            if beats[0] != seen:
                if is_reported:
                    log("the event loop continues")
                seen, blocked_s, is_reported = beats[0], 0.0, False
                continue
            # Count ticks instead of reading a clock: a process that was suspended as a whole has not blocked.
            blocked_s += TICK_S
            if blocked_s < LOGGED_AFTER_S or (is_reported and blocked_s < limit_s):
                continue
            frame = sys._current_frames().get(loop_thread)
            stack = "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:])
            is_starved = any(one.f_code is start_thread.__code__ for one, _ in traceback.walk_stack(frame))
            advice = OTHERS_HOLD if is_starved else "await it, or run it in a thread"
            message = f"a call has blocked this process for {blocked_s:.0f} s; {advice}:\n{stack}"
            if blocked_s >= limit_s:
                raise RunError(message, hints=["rollout.blocked_timeout_s is the limit"])
            log(message)
            is_reported = True

    start_task(beat(), "beat of the event loop")
    start_thread(watch, "watch over the event loop")


def _task_ended(task: asyncio.Task[Any], name: str) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _handler(name, error)


def _interrupt(name: str, error: BaseException) -> None:
    """Handle failed work in a program that is no process of a run: print the error and interrupt the main thread."""
    sys.stderr.write(f"areal: background work failed: {name}\n{''.join(traceback.format_exception(error))}")
    if not callable(signal.getsignal(signal.SIGINT)):  # ignored, as a shell's background jobs do: nothing to interrupt
        sys.stderr.flush()
        os._exit(1)
    _thread.interrupt_main()


_tasks: set[asyncio.Task[Any]] = set()
"""Running tasks. An event loop holds its tasks only weakly."""
_handler: Handler = _interrupt
