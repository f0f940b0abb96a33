"""An event loop with virtual time: the clock jumps to the next timer when no task can run."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that advances the clock instead of waiting, unless there is no timer or a thread works."""

    now = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or (self.threads and timeout > 0):
            return super().select(None)
        events = super().select(0)
        if not events:
            self.now += timeout
        return events

    def thread_ended(self, _: object) -> None:
        self.threads -= 1


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and stops while a task runs. Do not use sockets: I/O takes no time."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any arguments
        """Run a function in a thread. No virtual time passes until it ends."""
        self._clock.threads += 1
        done = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._clock.thread_ended)
        return done


def run_virtually(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in virtual time, like `asyncio.run`. Return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
