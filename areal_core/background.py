"""The one place of a process that starts background work: tasks of an event loop, and threads.

Work that ends with an exception ends the process with its cause. Nothing here restarts or forgets anything: whoever can
live with an error handles it inside of the work.
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
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Handler = Callable[[str, BaseException], None]

_Result = TypeVar("_Result")
TICK_S = 0.5
TOLD_S = 5.0
"""After which it is told that an event loop is blocked."""
SHOWN_FRAMES = 6
OTHERS_HOLD = "functions in threads hold the interpreter; make clients once and derive them: client.with_options(...)"
"""Where the event loop's own call waits for nothing but a new thread."""


def start_task(work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
    """Run a coroutine beside everything else of the running event loop.

    Args:
        work: ends by itself or is cancelled.
        name: what it is for, in words, for the error.
    """
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(lambda done: _task_ended(done, name))
    return task


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Run a function in a thread that does not keep the process alive."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not end unseen
            _handler(name, error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def on_failure(handler: Handler) -> Handler:
    """Say what happens when background work fails: called with its name and the exception; the former handler."""
    global _handler
    former, _handler = _handler, handler
    return former


def watch_event_loop(limit_s: float, log: Callable[[str], None]) -> None:
    """Notice, from a thread, when something blocks the running event loop, and say which line it is; until it closes.

    Args:
        limit_s: after which it ends as background work that failed, with `RunError`.
        log: called in that thread with what is to be said.
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
                    log("the event loop goes on")
                seen, blocked_s, is_reported = beats[0], 0.0, False
                continue
            # Its own ticks are counted, and no clock is read: a process that was stopped as a whole has not blocked.
            blocked_s += TICK_S
            if blocked_s < TOLD_S or (is_reported and blocked_s < limit_s):
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
    """In a program that is no process of a run: tell, and interrupt its main thread."""
    sys.stderr.write(f"areal: background work failed: {name}\n{''.join(traceback.format_exception(error))}")
    if not callable(signal.getsignal(signal.SIGINT)):  # ignored, as a shell's background jobs do: nothing to interrupt
        sys.stderr.flush()
        os._exit(1)
    _thread.interrupt_main()


_tasks: set[asyncio.Task[Any]] = set()
"""An event loop holds its tasks weakly; these are those under way."""
_handler: Handler = _interrupt
