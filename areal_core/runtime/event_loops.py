"""Runs the event loop of a process: uvloop if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def run_event_loop(work: Any) -> None:
    """Run a coroutine in a new event loop until it returns.

    Args:
        work: the coroutine. Its result is discarded, and an exception that it raises is raised here.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work)


def run_through_exits(work: Any) -> None:
    """Run a coroutine, and continue if a task of user code raises `SystemExit` or `KeyboardInterrupt`.

    asyncio stops the event loop for these two, whichever task raises them. A caller that awaits the task gets the
    exception as well. Use this in processes that receive no Ctrl-C.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        loop = runner.get_loop()
        task = asyncio.ensure_future(work, loop=loop)
        while not task.done():
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt):
                if task.done():  # the coroutine itself has raised it
                    raise


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
