"""How the fleet speaks to a server of this plugin: over a `Peer`, and with one answer for a whole request."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from areal_core.data.trajectory import FinishReason
from areal_core.errors import RunError
from areal_core.interfaces import InferenceCapabilities
from areal_core.servers.errors import UpdateRefusedError, in_time
from areal_core.servers.interface import Chunk, ServerIdentity
from areal_hf.connection import HFConnection
from areal_hf.messages import Abort, Ping, Update
from areal_hf.stop_texts import cut_at_stop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces import ModelReference, UpdateMode
    from areal_core.servers.interface import PartialGeneration
    from areal_hf.config import HFConfig


class HFAdapter:
    """Speaks to servers of this plugin. See `ServerAdapter`; methods for what they cannot do are left out.

    Args:
        settings: of the plugin.
    """

    name = "hf"
    group_store_prefixes: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __init__(self, settings: HFConfig) -> None:
        self._settings = settings
        self._model: ModelReference | None = None
        self._known_tokenizer: Any = None

    def serve(self, model: ModelReference) -> None:
        """Any model that transformers knows."""
        self._model = model

    def capabilities(self) -> InferenceCapabilities:
        """What the trainer could not reproduce is left out."""
        modes: frozenset[UpdateMode] = frozenset({"keep_cache", "recompute"})
        return InferenceCapabilities(modes, frozenset({"stop"}), self._settings.deterministic, images=True)

    def connect(self, address: str, settings: HFConfig) -> HFConnection:
        """With the fleet's key."""
        return HFConnection(address, settings.key)

    async def check_health(self, connection: HFConnection, timeout_s: float) -> None:
        """Answered between two steps, of which one may take longer than a look at servers that answer beside them."""
        await in_time(connection.loaded(), timeout_s)
        await in_time(connection.ask(Ping()), self._settings.update_timeout_s, "update_timeout_s")

    async def identify(self, connection: HFConnection) -> ServerIdentity:
        """What it says to everybody who comes."""
        told = await connection.loaded()
        slots = 1 if self._settings.deterministic else self._settings.max_concurrent_requests
        return ServerIdentity(told.program, told.model, told.sequence_length, slots, told.dtype)

    async def generate(self, connection: HFConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """All at once, when the answer is over."""
        stop = partial.sampling.stop
        sampling = replace(partial.sampling, stop=()) if stop else partial.sampling
        answer = await connection.generate(partial.input_ids.tolist(), sampling, partial.seed, partial.images)
        if answer is None:
            yield Chunk([], [], "abort")
            return
        generation, labels = answer
        if stop:
            generation = cut_at_stop(generation, stop, self._tokenizer())
        finish: Literal["stop", "length"] = "stop" if generation.finish_reason is FinishReason.STOP else "length"
        sampled = generation.sampled
        yield Chunk(sampled.ids, sampled.logprobs, finish, _spans(sampled.versions, labels), generation.columns)

    async def stop(self, connection: HFConnection, mode: UpdateMode) -> None:
        """Nothing: weights change between two steps."""

    async def resume(self, connection: HFConnection) -> None:
        """Nothing."""

    async def abort(self, connection: HFConnection) -> None:
        """End all requests; their tokens were not told, and are lost."""
        await connection.ask(Abort())

    async def load(self, connection: HFConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """What becomes of the cache of live requests is a setting of the server."""
        try:
            await connection.ask(Update(label, folder))
        except RunError as error:
            raise UpdateRefusedError(error.message) from None

    def name_of(self, connection: HFConnection) -> str:
        """There are no adapters."""
        return ""

    async def set_label(self, connection: HFConnection, label: str) -> None:
        """Name the weights that are there."""
        await connection.ask(Update(label, None))

    def _tokenizer(self) -> Any:
        """The model's; read when the first text that ends answers is asked for."""
        if self._known_tokenizer is None:
            from transformers import AutoTokenizer

            assert self._model is not None
            trusted = self._model.trust_remote_code
            self._known_tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=trusted)
        return self._known_tokenizer


def _spans(numbers: Sequence[int], labels: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """Of each run of tokens the label of its weights, whose numbers only rise."""
    spans, start = [], 0
    while start < len(numbers):
        end = bisect_right(numbers, numbers[start], start)
        spans.append((labels[numbers[start]], start, end))
        start = end
    return spans
