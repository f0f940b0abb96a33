"""The one place of a process that starts background work: tasks of an event loop, and threads.

Work that ends with an exception ends the process with its cause. Nothing here restarts or forgets anything: whoever can
live with an error handles it inside of the work.
"""

from __future__ import annotations

import _thread
import asyncio
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Handler = Callable[[str, BaseException], None]

_Result = TypeVar("_Result")


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


def _task_ended(task: asyncio.Task[Any], name: str) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _handler(name, error)


def _interrupt(name: str, error: BaseException) -> None:
    """In a program that is no process of a run: tell, and interrupt its main thread."""
    sys.stderr.write(f"areal: background work failed: {name}\n{''.join(traceback.format_exception(error))}")
    _thread.interrupt_main()


_tasks: set[asyncio.Task[Any]] = set()
"""An event loop holds its tasks weakly; these are those under way."""
_handler: Handler = _interrupt
