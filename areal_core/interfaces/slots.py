"""A lease of a server's slot, held while one partial generation is in progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_core.interfaces.inference import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.errors import RunError
    from areal_core.interfaces.inference import Grant, SlotRequest, Slots


class SlotLease:
    """`async with SlotLease(slots, request, on_slot_change) as grant` waits for a slot and releases it at the end.

    If the server is lost, the body is cancelled and `ServerLostError` raised, as `asyncio.timeout` does at a deadline.
    A `ServerLostError` that the body raises is reported to the pool as a failure of the server.

    Args:
        slots: where the slot comes from.
        request: which slot is wanted.
        on_slot_change: see `GenerationRequest.on_slot_change`.

    Raises:
        RunError: no server will ever be ready again.
        ServerLostError: the server was lost.

    Example:
        >>> import asyncio
        >>> from areal_core.servers import Grant, LeaseHolder, ServerLostError, SlotLease, SlotRequest, Slots
        >>> class OneServer(Slots):
        ...     def acquire(self, request: SlotRequest, holder: LeaseHolder):
        ...         holder.give(Grant("server-0", "", 3, "", labels_tokens=True, context=4096, vocabulary=1000))
        ...         asyncio.get_running_loop().call_later(0.01, holder.lose)
        ...
        ...     def release(self, holder: LeaseHolder, *, has_failed=False):
        ...         print("the slot is free again")
        >>> async def generate(slots):
        ...     try:
        ...         async with SlotLease(slots, SlotRequest()) as grant:
        ...             print(f"{grant.server} has weights of version {grant.version}")
        ...             await asyncio.sleep(60)  # the server is lost before it answers
        ...     except ServerLostError as error:
        ...         print(f"{error}: try another one")
        >>> asyncio.run(generate(OneServer()))
        server-0 has weights of version 3
        the slot is free again
        server-0 was lost: try another one
    """

    def __init__(
        self, slots: Slots, request: SlotRequest, on_slot_change: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._slots = slots
        self._request = request
        self._on_slot = on_slot_change
        self._granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._loss = asyncio.timeout(None)
        self._is_inside = False
        self._is_lost = False

    def give(self, grant: Grant) -> None:
        """See `LeaseHolder.give`."""
        if not self._granted.done():
            self._granted.set_result(grant)

    def fail(self, error: RunError) -> None:
        """See `LeaseHolder.fail`."""
        if not self._granted.done():
            self._granted.set_exception(error)

    def lose(self) -> None:
        """See `LeaseHolder.lose`."""
        if self._is_inside and not self._is_lost:
            self._loss.reschedule(0)
        self._is_lost = True

    async def __aenter__(self) -> Grant:
        self._on_slot(False)
        self._slots.acquire(self._request, self)
        try:
            grant = await self._granted
        except BaseException:
            self._slots.release(self)
            raise
        if self._is_lost:  # between the grant and this line
            self._slots.release(self)
            raise ServerLostError(f"{grant.server} was lost")
        self._on_slot(True)
        await self._loss.__aenter__()
        self._is_inside = True
        return grant

    async def __aexit__(self, *exception: object) -> None:
        self._is_inside = False
        try:
            await self._loss.__aexit__(*exception)  # type: ignore[arg-type]
        except TimeoutError:
            self._slots.release(self)
            raise ServerLostError(f"{self._granted.result().server} was lost") from None
        self._slots.release(self, has_failed=isinstance(exception[1], ServerLostError))
