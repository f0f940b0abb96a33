"""A slot of a server, held while one partial generation is under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_core.interfaces.inference import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.errors import RunError
    from areal_core.interfaces.inference import Grant, Slots, Want


class Slot:
    """`async with Slot(slots, want, on_slot) as grant` waits for a slot, says so, and gives it back.

    What happens within is broken off where the server is lost, and `ServerLostError` raised, as by a deadline of
    `asyncio.timeout`. Such an error, from whomever, is told to the pool as the server's fault.

    Raises:
        RunError: there will never be one.
    """

    def __init__(self, slots: Slots, want: Want, on_slot: Callable[[bool], None] = lambda _: None) -> None:
        self._slots, self._want, self._on_place = slots, want, on_slot
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
