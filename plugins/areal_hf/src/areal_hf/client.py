"""What asks the generating process for tokens: in each rollout worker."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.background import start_task
from areal_core.data import Generation, SampledTokens
from areal_core.data.trajectory import FinishReason
from areal_core.errors import RunError
from areal_core.interfaces import ServerLostError, Slot, Want
from areal_core.messages import Peer, PeerClosed, connect
from areal_core.servers.experts import ROUTED_EXPERTS
from areal_hf.messages import Cancel, Finished, Generate, Loaded, Refused
from areal_hf.stop_texts import cut_at_stop

if TYPE_CHECKING:
    from areal_core.data.trajectory import Values
    from areal_core.interfaces import (
        GenerationRequest,
        InferenceCapabilities,
        ModelReference,
        SamplingParameters,
        Slots,
    )
    from areal_hf.config import HFConfig

_CONNECT_TIMEOUT_S = 60.0
_LOST_PAUSE_S = 0.05
"""Before a request lines up again that was lost with its process."""


class HFClient:
    """An `InferenceClient` for the generating process.

    Args:
        settings: of the plugin.
        capabilities: of the engine.
        slots: where slots come from.
        model: of the run.
    """

    def __init__(
        self, settings: HFConfig, capabilities: InferenceCapabilities, slots: Slots, model: ModelReference
    ) -> None:
        self.capabilities = capabilities
        self._settings = settings
        self._slots = slots
        self._model = model
        self._asking: dict[str, asyncio.Task[_Connection]] = {}
        self._known_tokenizer: Any = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceClient.generate`."""
        sampling = replace(request.sampling, stop=())
        if asked := sampling.unsupported():
            raise ValueError(f"the embedded engine does not support the sampling settings {', '.join(asked)}")
        sampling.check()
        while True:
            try:
                async with Slot(self._slots, Want(), request.on_place) as grant:
                    generation = await (await self._connection(grant.address)).generate(request, sampling)
                    break
            except ServerLostError:  # where it will not come again, the next slot says so
                await asyncio.sleep(_LOST_PAUSE_S)
        stop = request.sampling.stop
        return cut_at_stop(generation, stop, self._tokenizer()) if stop else generation

    async def close(self) -> None:
        """See `InferenceClient.close`."""
        for opening in self._asking.values():
            with contextlib.suppress(PeerClosed, OSError, ServerLostError):
                await (await opening).peer.close()

    async def _connection(self, address: str) -> _Connection:
        known = self._asking.get(address)
        if known is None or (known.done() and (known.exception() or known.result().is_over)):
            known = self._asking[address] = asyncio.ensure_future(_Connection.open(address))
        return await asyncio.shield(known)

    def _tokenizer(self) -> Any:
        """The model's; read when the first text that ends answers is asked for."""
        if self._known_tokenizer is None:
            from transformers import AutoTokenizer

            trusted = self._model.trust_remote_code
            self._known_tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=trusted)
        return self._known_tokenizer


class _Connection:
    """To one generating process.

    Args:
        peer: the connection.
        limits: what it can take.
    """

    def __init__(self, peer: Peer, limits: Loaded) -> None:
        self.peer = peer
        self._limits = limits
        self._numbers = 0
        self._generations: dict[int, asyncio.Future[Generation]] = {}
        self._receiving = start_task(self._receive(), "answers of the embedded engine")

    @classmethod
    async def open(cls, address: str) -> _Connection:
        """Connect.

        Raises:
            ServerLostError: the process is gone.
        """
        try:
            peer = await connect(address, _CONNECT_TIMEOUT_S, "client")
            return cls(peer, await peer.receive())
        except (OSError, RunError) as error:
            raise ServerLostError(f"the embedded engine has died: {error}") from None

    @property
    def is_over(self) -> bool:
        """Whether nothing will be answered any more."""
        return self._receiving.done()

    async def generate(self, request: GenerationRequest, sampling: SamplingParameters) -> Generation:
        """Continue one sequence.

        Raises:
            ValueError: it cannot be served.
            ServerLostError: the process is gone.
        """
        limits = self._limits
        request.check(limits.vocabulary, limits.sequence_length, "the longest sequence is")
        request.check(limits.vocabulary, limits.cache_tokens, "cache_gib has room for")
        number = self._numbers = self._numbers + 1
        result = self._generations[number] = asyncio.get_running_loop().create_future()
        if self.is_over:
            raise ServerLostError("the embedded engine has died")
        try:
            self.peer.notify(Generate(number, list(request.input_ids), sampling, request.seed, request.images))
            return await result
        except PeerClosed:
            raise ServerLostError("the embedded engine has died") from None
        except asyncio.CancelledError:
            with contextlib.suppress(PeerClosed):
                self.peer.notify(Cancel(number))
            raise
        finally:
            self._generations.pop(number, None)

    async def _receive(self) -> None:
        reason = "has died"
        try:
            while True:
                match await self.peer.receive():
                    case Finished() as finished:
                        self._finish(finished)
                    case Refused(number, text) if (refused := self._generations.get(number)) and not refused.done():
                        refused.set_exception(ValueError(text))
        except PeerClosed:
            pass
        except (LookupError, TypeError, ValueError) as error:
            reason = f"sent an answer that makes no sense ({error!r})"
            await self.peer.close()
        for waiting in self._generations.values():
            if not waiting.done():
                waiting.set_exception(ServerLostError(f"the embedded engine {reason}"))

    def _finish(self, message: Finished) -> None:
        counts = message.counts
        size = 4 * sum(counts)
        view = memoryview(message.columns)
        tokens = array("q", view[:size].cast("i"))
        versions, logprobs = array("i", bytes(view[size : 2 * size])), array("f", bytes(view[2 * size : 3 * size]))
        columns = (
            self._columns(message.computed, view[3 * size :]) if self._limits.experts_shape else [{}] * len(counts)
        )
        start = 0
        for number, count, stopped, told in zip(message.numbers, counts, message.stopped, columns, strict=True):
            future = self._generations.get(number)
            end = start + count
            if future is not None and not future.done():
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                sampled = SampledTokens(tokens[start:end], logprobs[start:end], versions[start:end])
                future.set_result(Generation.of(sampled, reason, told))
            start = end

    def _columns(self, computed: list[int], data: memoryview) -> list[dict[str, Values]]:
        """Of each generation, the experts by which its tokens were predicted; nothing predicts the first."""
        shape, dtype = self._limits.experts_shape, self._limits.experts_dtype
        told = np.frombuffer(data, dtype).reshape(-1, *shape)
        first = np.zeros((1, *shape), dtype)
        return [{ROUTED_EXPERTS: np.concatenate([first, each])} for each in np.split(told, np.cumsum(computed)[:-1])]
