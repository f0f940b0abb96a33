"""Slots of servers, each held while one partial generation is under way."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from areal_core.interfaces.inference import Grant, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.errors import RunError
    from areal_core.interfaces.inference import SlotHolder, Slots, Want


class Slot:
    """`async with Slot(slots, want, on_place) as grant` waits for a slot, says so, and gives it back.

    What happens within is broken off where the server is lost, and `ServerLostError` raised, as by a deadline of
    `asyncio.timeout`. Such an error, from whomever, is told to the pool as the server's fault.

    Raises:
        RunError: there will never be one.
    """

    def __init__(self, slots: Slots, want: Want, on_place: Callable[[bool], None] = lambda _: None) -> None:
        self._slots, self._want, self._on_place = slots, want, on_place
        self._granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._break_off = asyncio.timeout(None)
        self._is_inside = self._is_lost = False

    def give(self, grant: Grant) -> None:
        """See `SlotHolder.give`."""
        if not self._granted.done():
            self._granted.set_result(grant)

    def fail(self, error: RunError) -> None:
        """See `SlotHolder.fail`."""
        if not self._granted.done():
            self._granted.set_exception(error)

    def lose(self) -> None:
        """See `SlotHolder.lose`."""
        if self._is_inside and not self._is_lost:
            self._break_off.reschedule(0)
        self._is_lost = True

    async def __aenter__(self) -> Grant:
        self._on_place(False)
        self._slots.acquire(self._want, self)
        try:
            grant = await self._granted
        except BaseException:
            self._slots.release(self)
            raise
        if self._is_lost:  # between the grant and this
            self._slots.release(self)
            raise ServerLostError(f"{grant.server} was lost")
        self._on_place(True)
        await self._break_off.__aenter__()
        self._is_inside = True
        return grant

    async def __aexit__(self, *ended: object) -> None:
        self._is_inside = False
        try:
            await self._break_off.__aexit__(*ended)  # type: ignore[arg-type]
        except TimeoutError:
            self._slots.release(self)
            raise ServerLostError(f"{self._granted.result().server} was lost") from None
        self._slots.release(self, has_failed=isinstance(ended[1], ServerLostError))


class SlotQueue:
    """The slots of an engine that has one server, given out in order of arrival; a `Slots`."""

    def __init__(self) -> None:
        self._waiting: deque[SlotHolder] = deque()
        self._held: set[SlotHolder] = set()
        self._grant: Grant | None = None
        self._count = 0
        self._failure: RunError | None = None

    def open(self, grant: Grant | None, count: int) -> None:
        """From now on so many slots are given out, each of them this one; None: none for now."""
        self._grant, self._count = grant, count
        self._wake()

    def fail(self, error: RunError) -> None:
        """There will never be a slot again, and those that are held are lost."""
        self._grant, self._failure = None, error
        for holder in self._held:
            holder.lose()
        self._wake()

    def acquire(self, want: Want, holder: SlotHolder) -> None:
        """See `Slots.acquire`."""
        self._waiting.append(holder)
        self._wake()

    def release(self, holder: SlotHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        if holder in self._held:
            self._held.remove(holder)
            self._wake()
        elif holder in self._waiting:
            self._waiting.remove(holder)

    def _wake(self) -> None:
        while self._waiting and self._failure is not None:
            self._waiting.popleft().fail(self._failure)
        while self._waiting and self._grant is not None and len(self._held) < self._count:
            holder = self._waiting.popleft()
            self._held.add(holder)
            holder.give(self._grant)
