"""Ordinary functions of users beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from areal_core.processes import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises, called in a thread of its own.

    Nobody can end a thread: one that is not waited for any more goes on until it returns, and holds up no exit.
    """
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except StopIteration as error:  # no future can bring it
            done.set_exception(RuntimeError(f"{function} raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - whoever waits is told, whatever it is
            done.set_exception(error)
        else:
            done.set_result(result)

    start_thread(call, "a function of a user's")
    return await asyncio.wrap_future(done)
