"""An engine whose model is in the rollout controller's own process, for rollout workers: for tests and benchmarks.

It listens for workers and answers what they ask. A true engine's tokens do not pass through the controller.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.data import FinishReason, Generation
from areal_core.errors import RunError
from areal_core.processes import Failed, Message, Peer, PeerClosed, connect, private_folder, serve, start_task
from areal_core.servers import (
    GenerationRequest,
    Grant,
    InferenceCapabilities,
    InferenceEngine,
    SamplingParameters,
    ServerLostError,
    SlotLease,
    SlotRequest,
)

if TYPE_CHECKING:
    from areal_core.engines import ModelReference
    from areal_core.servers import LeaseHolder, Slots

CONNECT_S = 60.0


class Ask(Message):
    """A `GenerationRequest`. Answered with `Answer`."""

    input_ids: list[int]
    sampling: SamplingParameters
    seed: int


class Answer(Message):
    """A `Generation`."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: int


class Served(InferenceEngine):
    """The base of engines that generate in this process and are asked by rollout workers over a socket."""

    _grant: Grant | None = None
    _waiting: list[LeaseHolder] | None = None

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`; the first one begins to listen."""
        if self._waiting is None:
            self._waiting = []
            start_task(self._listen(), "listening for rollout workers")
        if self._grant is None:
            self._waiting.append(holder)
        else:
            holder.give(self._grant)

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`: there is one for everybody."""

    def client(self, slots: Slots, model: ModelReference) -> ServedClient:
        """See `InferenceEngine.client`."""
        return ServedClient(self.capabilities, slots)

    async def _listen(self) -> None:
        with private_folder() as folder:
            server = await serve(f"unix:{folder / 'socket'}", self._on_message)
            self._grant = Grant("served", server.address, 0, "", labels_tokens=True, context=0, vocabulary=0)
            for holder in self._waiting or ():
                holder.give(self._grant)
            await asyncio.Event().wait()

    async def _on_message(self, peer: Peer) -> None:
        while True:
            asked, number = await peer.receive_request()
            start_task(self._answer(peer, asked, number), "an answer of an engine of this process")

    async def _answer(self, peer: Peer, asked: Ask, number: int) -> None:
        try:
            request = GenerationRequest(str(number), asked.input_ids, asked.sampling, asked.seed)
            made = await self.generate(request)
            lists = list(made.output_ids), list(made.logprobs), list(made.versions)
            peer.reply(number, Answer(*lists, int(made.finish_reason)))
        except Exception as error:  # noqa: BLE001 - it costs this request
            peer.reply(number, Failed(f"{type(error).__name__}: {error}"))


class ServedClient:
    """An `InferenceClient` for `Served`."""

    def __init__(self, capabilities: InferenceCapabilities, slots: Slots) -> None:
        self.capabilities = capabilities
        self._slots = slots
        self._opening: asyncio.Task[Peer] | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceClient.generate`."""
        async with SlotLease(self._slots, SlotRequest(), request.on_slot_change) as grant:
            if self._opening is None:
                self._opening = start_task(connect(grant.address, CONNECT_S, "worker"), "connecting to the engine")
            peer = await asyncio.shield(self._opening)
            try:
                asked = Ask(list(request.input_ids), request.sampling, request.seed)
                made: Answer = await peer.request(asked, None, "a generation")
            except PeerClosed:
                raise ServerLostError("the engine is gone") from None
            except RunError as error:
                raise ValueError(error.message) from None
        return Generation(made.output_ids, made.logprobs, made.versions, FinishReason(made.finish_reason))

    async def close(self) -> None:
        """See `InferenceClient.close`."""
        with suppress(Exception):
            if self._opening is not None:
                peer: Any = await self._opening
                await peer.close()
