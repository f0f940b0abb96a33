"""Running the event loop of a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def run_event_loop(work: Any) -> None:
    """Run a coroutine in the fastest event loop that is installed."""
    with asyncio.Runner(loop_factory=_fastest()) as runner:
        runner.run(work)


def run_through_exits(work: Any) -> None:
    """The same for a process that nobody interrupts: what a task of a user's code raises does not end the loop."""
    with asyncio.Runner(loop_factory=_fastest()) as runner:
        loop = runner.get_loop()
        task = asyncio.ensure_future(work, loop=loop)
        while not task.done():
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these out of any task, such as one that a workflow has started; whoever waits for that
                # task meets them too.
                if task.done():
                    raise


def _fastest() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make
