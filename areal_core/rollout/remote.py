"""A rollout worker's end of its connection to the controller: generation comes from there, and groups to be run."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from safetensors.torch import load

from areal_core.background import start_task
from areal_core.data.trajectory import FinishReason, Generation
from areal_core.errors import RunError
from areal_core.interfaces.inference import InferenceCapabilities
from areal_core.messages import Failed, Message, PeerClosed
from areal_core.messages.workflows import (
    AttemptFailed,
    CancelGeneration,
    CancelGroup,
    Generate,
    Generated,
    GroupEnded,
    GroupFacts,
    Placed,
    RunGroup,
    Unserved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.interfaces.inference import GenerationRequest
    from areal_core.messages import Peer
    from areal_core.rollout.groups import GroupRunner


class RemoteEngine:
    """Generates in the controller's engine; of an `InferenceEngine` it has what episodes use.

    Args:
        peer: to the controller.
        tells_places, images: see `InferenceCapabilities`.
    """

    def __init__(self, peer: Peer, *, tells_places: bool, images: bool) -> None:
        self.capabilities = InferenceCapabilities(frozenset(), tells_places=tells_places, images=images)
        self._peer = peer
        self._numbers = itertools.count()
        self._places: dict[int, Callable[[bool], None]] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        place = next(self._numbers)
        self._places[place] = request.on_place
        ids, sampling = tuple(request.input_ids), request.sampling
        asked = Generate(place, ids, sampling, request.seed, request.affinity, request.conversation, request.images)
        try:
            found = await self._peer.request(asked, None, "a generation")
        except asyncio.CancelledError:
            with suppress(PeerClosed):
                self._peer.notify(CancelGeneration(place))
            raise
        finally:
            del self._places[place]
        if isinstance(found, Unserved):
            raise ValueError(found.text)
        assert isinstance(found, Generated)
        lists = [*found.output_ids], [*found.logprobs], [*found.versions]
        columns = load(found.columns) if found.columns else {}
        return Generation(*lists, FinishReason(found.finish_reason), columns)

    def told(self, placed: Placed) -> None:
        """The engine has said whether a request has its place."""
        if (on_place := self._places.get(placed.place)) is not None:
            on_place(placed.has_place)


class WorkerService:
    """Runs the groups that the controller sends.

    Args:
        peer: to the controller.
        groups: runs them.
        engine: hears of places.
    """

    def __init__(self, peer: Peer, groups: GroupRunner, engine: RemoteEngine) -> None:
        self._peer = peer
        self._groups = groups
        self._engine = engine
        self._running: dict[tuple[int, tuple[int, ...]], asyncio.Task[None]] = {}
        groups.on_failure = self._attempt_failed

    async def serve(self) -> None:
        """Until the controller is gone."""
        with suppress(PeerClosed):
            while True:
                message, number = await self._peer.receive_request()
                match message:
                    case RunGroup():
                        key = message.number, message.samples
                        task = self._running[key] = start_task(self._run(message, number), f"group {message.number}")
                        task.add_done_callback(partial(self._forget, key))
                    case CancelGroup(group, samples) if (group, samples) in self._running:
                        self._running[group, samples].cancel()
                    case Placed():
                        self._engine.told(message)

    async def _run(self, task: RunGroup, number: int) -> None:
        reply: Message
        try:
            reply = await self._groups.run(task)
        except PeerClosed:
            return
        except RunError as error:
            reply = Failed(error.message, error.hints)
        except Exception as error:  # noqa: BLE001 - it costs this group, and not the others of this process
            told = "".join(traceback.format_exception(error))
            reply = GroupEnded(GroupFacts((), {}, (), len(task.samples), told, is_kept=True))
        self._peer.reply(number, reply)

    def _forget(self, key: tuple[int, tuple[int, ...]], task: asyncio.Task[None]) -> None:
        if self._running.get(key) is task:  # the same group may have been sent again
            del self._running[key]

    def _attempt_failed(self, group: int, sample: int, attempt: int, error: str) -> None:
        with suppress(PeerClosed):
            self._peer.notify(AttemptFailed(group, sample, attempt, error))
