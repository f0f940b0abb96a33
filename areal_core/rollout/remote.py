"""A rollout worker's end of its connection to the controller: slots of servers come from there, and groups to run."""

from __future__ import annotations

import itertools
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.errors import RunError, writable
from areal_core.messages import Failed, Message, PeerClosed
from areal_core.messages.workflows import (
    Acquire,
    AttemptFailed,
    Granted,
    GroupEnded,
    GroupFacts,
    NoSlot,
    Release,
    RunGroup,
    SlotLost,
)

if TYPE_CHECKING:
    from areal_core.interfaces.inference import SlotHolder, Want
    from areal_core.messages import Peer
    from areal_core.rollout.groups import GroupRunner


class RemoteSlots:
    """Slots that the controller gives; a `Slots`.

    Args:
        peer: to the controller.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._numbers = itertools.count()
        self._holders: dict[int, SlotHolder] = {}
        self._known: dict[SlotHolder, int] = {}

    def acquire(self, want: Want, holder: SlotHolder) -> None:
        """See `Slots.acquire`."""
        number = self._known[holder] = next(self._numbers)
        self._holders[number] = holder
        self._peer.notify(Acquire(number, want))

    def release(self, holder: SlotHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        number = self._known.pop(holder)
        del self._holders[number]
        with suppress(PeerClosed):
            self._peer.notify(Release(number, has_failed))

    def on_message(self, message: Granted | NoSlot | SlotLost) -> None:
        """What the controller says of a slot; of one that was given back meanwhile nobody wants to know."""
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
        peer: to the controller.
        groups: runs them.
        slots: hear what the controller says of them.
    """

    def __init__(self, peer: Peer, groups: GroupRunner, slots: RemoteSlots) -> None:
        self._peer = peer
        self._groups = groups
        self._slots = slots
        groups.runner.on_failure = self._attempt_failed

    async def serve(self) -> None:
        """Until the controller is gone."""
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
        except Exception as error:  # noqa: BLE001 - it costs this group, and not the others of this process
            told = writable("".join(traceback.format_exception(error)))
            reply = GroupEnded(GroupFacts((), {}, (), len(task.samples), told, is_kept=True))
        self._peer.reply(number, reply)

    def _attempt_failed(self, group: int, sample: int, attempt: int, error: str) -> None:
        with suppress(PeerClosed):
            self._peer.notify(AttemptFailed(group, sample, attempt, error))
