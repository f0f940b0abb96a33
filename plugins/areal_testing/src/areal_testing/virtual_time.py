"""An event loop whose time passes at once: a sleeping task wakes as soon as no other has anything to do."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


class _Jumping(selectors.DefaultSelector):
    """Moves the clock instead of waiting, unless there is no timer or a thread works."""

    now, threads = 0.0, 0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if self.threads and timeout else timeout and 0)
        self.now += 0.0 if found else timeout or 0.0
        return found

    def thread_ended(self, _: object) -> None:
        self.threads -= 1


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock starts at 0 and stops while any task runs. Do not use it with sockets: their work takes no time."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any arguments
        """Run a function in a thread; no virtual time passes meanwhile."""
        self._clock.threads += 1
        done = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._clock.thread_ended)
        return done


def run_virtually(work: Coroutine[Any, Any, _Result]) -> _Result:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
