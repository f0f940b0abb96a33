"""Run users' functions in threads, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from areal_core.processes import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new daemon thread and return its result, or raise its exception.

    Threads cannot be killed: if the caller is cancelled, the function keeps running until it returns. It does not delay
    the exit of the process.
    """
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except StopIteration as error:  # a future cannot hold a StopIteration
            done.set_exception(RuntimeError(f"{function} raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            done.set_exception(error)
        else:
            done.set_result(result)

    start_thread(call, "a user's function")
    return await asyncio.wrap_future(done)
