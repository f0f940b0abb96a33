"""A rollout worker's end of its connection to the controller, which sends groups to run and slots of servers."""

from __future__ import annotations

import itertools
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.errors import RunError, writable
from areal_core.messages.workflows import (
    Acquire,
    AttemptFailed,
    Granted,
    GroupOutcome,
    GroupResult,
    NoSlot,
    Release,
    RunGroup,
    SlotLost,
)
from areal_core.runtime.rpc import Failed, Message, PeerClosed

if TYPE_CHECKING:
    from areal_core.interfaces.inference import LeaseHolder, SlotRequest
    from areal_core.rollout.groups import GroupRunner
    from areal_core.runtime.rpc import Peer


class RemoteSlots:
    """Leases slots over the connection to the controller; see `Slots`.

    Args:
        peer: the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._numbers = itertools.count()
        self._holders: dict[int, LeaseHolder] = {}
        self._known: dict[LeaseHolder, int] = {}

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`."""
        number = self._known[holder] = next(self._numbers)
        self._holders[number] = holder
        self._peer.notify(Acquire(number, request))

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        number = self._known.pop(holder)
        del self._holders[number]
        with suppress(PeerClosed):
            self._peer.notify(Release(number, has_failed))

    def on_message(self, message: Granted | NoSlot | SlotLost) -> None:
        """Pass the controller's message about a slot to its holder, if the slot was not released meanwhile."""
        if (holder := self._holders.get(message.number)) is None:
            return
        match message:
            case Granted(_, grant):
                holder.give(grant)
            case NoSlot(_, text, hints):
                holder.fail(RunError(text, hints=hints))
            case SlotLost():
                holder.lose()


class WorkerService:
    """Runs the groups that the controller sends.

    Args:
        peer: the connection to the controller.
        groups: runs groups.
        slots: gets the controller's messages about slots.
    """

    def __init__(self, peer: Peer, groups: GroupRunner, slots: RemoteSlots) -> None:
        self._peer = peer
        self._groups = groups
        self._slots = slots
        groups.runner.on_failure = self._attempt_failed

    async def serve(self) -> None:
        """Serve until the controller is gone."""
        with suppress(PeerClosed):
            while True:
                message, number = await self._peer.receive_request()
                match message:
                    case RunGroup():
                        start_task(self._run(message, number), f"group {message.number}")
                    case Granted() | NoSlot() | SlotLost():
                        self._slots.on_message(message)

    async def _run(self, task: RunGroup, number: int) -> None:
        reply: Message
        try:
            reply = await self._groups.run(task)
        except PeerClosed:
            return
        except RunError as error:
            reply = Failed(error.message, error.hints)
        except Exception as error:  # noqa: BLE001 - fails this group, and no other of this process
            trace = writable("".join(traceback.format_exception(error)))
            reply = GroupResult(GroupOutcome((), {}, (), len(task.samples), trace, is_kept=True))
        self._peer.reply(number, reply)

    def _attempt_failed(self, group: int, sample: int, attempt: int, error: str) -> None:
        with suppress(PeerClosed):
            self._peer.notify(AttemptFailed(group, sample, attempt, error))
