"""An inference engine in the rollout controller's process that rollout workers can call: for tests and benchmarks.

The engine listens on a socket and answers the workers' requests. Tokens of a real engine do not pass through the
controller.
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
"""Timeout for a worker to connect to the engine."""


class GenerateMessage(Message):
    """The content of a `GenerationRequest`. The reply is a `GenerationMessage`."""

    input_ids: list[int]
    sampling: SamplingParameters
    seed: int


class GenerationMessage(Message):
    """A `Generation`."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: int
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    prompt_logprobs: list[float] | None


class Served(InferenceEngine):
    """The base of engines that generate in the controller's process. Rollout workers call them over a socket."""

    _grant: Grant | None = None
    _waiting: list[LeaseHolder] | None = None

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`. The first call starts the socket server."""
        if self._waiting is None:
            self._waiting = []
            start_task(self._listen(), "listening for rollout workers")
        if self._grant is None:
            self._waiting.append(holder)
        else:
            holder.give(self._grant)

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """Do nothing: the one grant is shared by all holders. See `Slots.release`."""

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
            message, number = await peer.receive_request()
            start_task(self._answer(peer, message, number), "answering a rollout worker")

    async def _answer(self, peer: Peer, message: GenerateMessage, number: int) -> None:
        try:
            request = GenerationRequest(str(number), message.input_ids, message.sampling, message.seed)
            generation = await self.generate(request)
            lists = list(generation.output_ids), list(generation.logprobs), list(generation.versions)
            tops = generation.top_ids.tolist(), generation.top_logprobs.tolist()
            reason, of_prompt = int(generation.finish_reason), generation.prompt_logprobs
            peer.reply(number, GenerationMessage(*lists, reason, *tops, of_prompt))
        except Exception as error:  # noqa: BLE001 - the error fails only this request
            peer.reply(number, Failed(f"{type(error).__name__}: {error}"))


class ServedClient:
    """The `InferenceClient` of a `Served` engine."""

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
                message = GenerateMessage(list(request.input_ids), request.sampling, request.seed)
                generation: GenerationMessage = await peer.request(message, None, "a generation")
            except PeerClosed:
                raise ServerLostError("the engine closed the connection") from None
            except RunError as error:
                raise ValueError(error.message) from None
        return Generation(
            generation.output_ids,
            generation.logprobs,
            generation.versions,
            FinishReason(generation.finish_reason),
            top_ids=generation.top_ids,
            top_logprobs=generation.top_logprobs,
            prompt_logprobs=generation.prompt_logprobs,
        )

    async def close(self) -> None:
        """See `InferenceClient.close`."""
        with suppress(Exception):
            if self._opening is not None:
                peer: Any = await self._opening
                await peer.close()
