"""Adapter for servers of this plugin. They exchange messages over a `Peer`, and answer a request in one message."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from areal_core.data import FinishReason
from areal_core.errors import RunError
from areal_core.servers import (
    Chunk,
    InferenceCapabilities,
    ServerAdapter,
    ServerCommand,
    ServerIdentity,
    UpdateRefusedError,
    in_time,
)
from areal_hf.config import HFConfig
from areal_hf.connection import HFConnection
from areal_hf.messages import Abort, Ping, Update
from areal_hf.stop_texts import cut_at_stop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.engines import ModelReference
    from areal_core.servers import PartialGeneration, UpdateMode


class HFAdapter(ServerAdapter):
    """Translates requests and weight updates for servers of this plugin. See `ServerAdapter` for the methods."""

    Config = HFConfig
    settings: HFConfig
    name = "hf"

    def __init__(self, settings: HFConfig) -> None:
        super().__init__(settings)
        self._model: ModelReference | None = None
        self._known_tokenizer: Any = None

    def serve(self, model: ModelReference) -> None:
        """Set the model, whose tokenizer may be needed. The server accepts any model that transformers can load."""
        self._model = model

    def capabilities(self) -> InferenceCapabilities:
        """See `ServerAdapter.capabilities`. Sampling settings that the trainer cannot reproduce are not supported."""
        modes: frozenset[UpdateMode] = frozenset({"keep_cache", "recompute"})
        return InferenceCapabilities(
            modes, frozenset({"stop", "top_logprobs", "prompt_logprobs"}), self.settings.deterministic, images=True
        )

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """Return the command for a server outside of a run, at a socket in `scratch`. In a run see `HFConfig.serve`."""
        address = f"unix:{scratch / str(port)}"
        settings, reference = self.settings.model_dump_json(), msgspec.json.encode(model).decode()
        arguments = [sys.executable, "-m", "areal_hf", settings, reference, address]
        return ServerCommand(arguments, {"OMP_NUM_THREADS": str(self.settings.threads)}, address)

    def connect(self, address: str) -> HFConnection:
        """Return a connection that sends the fleet's key."""
        return HFConnection(address, self.settings.key)

    async def check_health(self, connection: HFConnection, timeout_s: float) -> None:
        """Wait for an answer between two steps.

        One step may take longer than `timeout_s`. So after the connection is open, update_timeout_s is the timeout.
        """
        await in_time(connection.loaded(), timeout_s)
        await in_time(connection.ask(Ping()), self.settings.update_timeout_s, "update_timeout_s")

    async def identify(self, connection: HFConnection) -> ServerIdentity:
        """Return what the server reports to each new connection: program, model, context, slots and dtype."""
        loaded = await connection.loaded()
        slots = 1 if self.settings.deterministic else self.settings.max_concurrent_requests
        return ServerIdentity(loaded.program, loaded.model, loaded.sequence_length, slots, loaded.dtype)

    async def generate(self, connection: HFConnection, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Yield the whole answer as one chunk when it is complete."""
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
        yield Chunk(
            sampled.ids,
            sampled.logprobs,
            finish,
            _spans(sampled.versions, labels),
            generation.columns,
            sampled.top_ids,
            sampled.top_logprobs,
            generation.prompt_logprobs or (),
        )

    async def stop(self, connection: HFConnection, mode: UpdateMode) -> None:
        """Do nothing: weights change between two steps."""

    async def resume(self, connection: HFConnection) -> None:
        """Do nothing."""

    async def abort(self, connection: HFConnection) -> None:
        """End all requests. Their tokens are lost, for an answer is sent only when it is complete."""
        await connection.ask(Abort())

    async def load(self, connection: HFConnection, folder: Path, label: str, mode: UpdateMode) -> None:
        """Load the weights. The server's own update_mode decides about the cache of live requests.

        Raises:
            UpdateRefusedError: the server refuses the weights.
        """
        try:
            await connection.ask(Update(label, folder))
        except RunError as error:
            raise UpdateRefusedError(error.message) from None

    async def set_label(self, connection: HFConnection, label: str) -> None:
        """Set the label of the weights that the server has loaded."""
        await connection.ask(Update(label, None))

    def _tokenizer(self) -> Any:
        """Return the model's tokenizer. It is loaded for the first request with stop strings."""
        if self._known_tokenizer is None:
            from transformers import AutoTokenizer

            assert self._model is not None
            trusted = self._model.trust_remote_code
            self._known_tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=trusted)
        return self._known_tokenizer


def _spans(numbers: Sequence[int], labels: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """Return (label, start, end) of each run of tokens with the same weights. The weights' numbers ascend."""
    spans, start = [], 0
    while start < len(numbers):
        end = bisect_right(numbers, numbers[start], start)
        spans.append((labels[numbers[start]], start, end))
        start = end
    return spans
