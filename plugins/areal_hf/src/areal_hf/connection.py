"""The connection to a server of this plugin, used by rollout workers and by the controller."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from areal_core.data import FinishReason, Generation, SampledTokens
from areal_core.models import ROUTED_EXPERTS
from areal_core.processes import Credentials, Peer, PeerClosed, connect_once, start_task
from areal_core.servers import RequestRefusedError, ServerLostError, ServerUnreachableError
from areal_hf.messages import Aborted, Cancel, Finished, Generate, Loaded, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import Values
    from areal_core.errors import RunError
    from areal_core.processes import Message
    from areal_core.servers import SamplingParameters

    Answer = tuple[Generation, Mapping[int, str]]
    """A generation whose versions are numbers of weights, and the label of each number."""


class HFConnection:
    """A connection to a server; see `areal_core.servers.Connection`. It opens at the first message.

    Args:
        address: address of the server.
        key: key of the server, or empty if it has none.
    """

    def __init__(self, address: str, key: str = "") -> None:
        self.address = address
        self._key = key
        self._opening: asyncio.Future[_Channel] | None = None

    async def loaded(self) -> Loaded:
        """Return what the server reports to each new connection.

        Raises:
            ServerLostError: the server cannot be reached, or refuses the key.
        """
        return (await self._channel()).loaded

    async def ask(self, message: Message) -> None:
        """Send a command, and return when the server has executed it.

        Raises:
            RunError: the command failed on the server.
            ServerLostError: the connection is lost.
        """
        channel = await self._channel()
        try:
            await channel.peer.request(message, None, "a command")
        except PeerClosed as error:
            raise _lost(error) from None

    async def generate(
        self, input_ids: list[int], sampling: SamplingParameters, seed: int, images: tuple[str, ...]
    ) -> Answer | None:
        """Continue one sequence. Return None if the request was aborted.

        Raises:
            RequestRefusedError: the server refuses the request.
            ServerLostError: the connection is lost.
        """
        return await (await self._channel()).generate(input_ids, sampling, seed, images)

    def close(self) -> None:
        """See `Connection.close`."""
        opening, self._opening = self._opening, None
        if opening is None or opening.cancel():
            return
        if not opening.cancelled() and opening.exception() is None:
            opening.result().peer.abort()

    async def _channel(self) -> _Channel:
        opening = self._opening
        is_usable = opening is not None and not (
            opening.done() and (opening.cancelled() or opening.exception() or opening.result().is_closed)
        )
        if opening is None or not is_usable:
            opening = self._opening = asyncio.ensure_future(_Channel.open(self.address, Credentials(self._key)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise ServerLostError("the connection was closed") from None
            raise


class _Channel:
    """An open connection.

    Args:
        peer: connection to the server.
        loaded: the report of the server.
    """

    def __init__(self, peer: Peer, loaded: Loaded) -> None:
        self.peer = peer
        self.loaded = loaded
        self._numbers = itertools.count(1)
        self._labels: dict[int, str] = {}
        self._requests: dict[int, asyncio.Future[Answer | None]] = {}
        self._receiving = start_task(self._receive(), "answers of a server")

    @classmethod
    async def open(cls, address: str, credentials: Credentials) -> _Channel:
        """Connect to a server.

        Raises:
            ServerLostError: the server cannot be reached, or refuses the key.
        """
        try:
            peer = await connect_once(address, "fleet", credentials)
        except (OSError, ValueError, PeerClosed) as error:
            kind = ServerUnreachableError if isinstance(error, ConnectionError) else ServerLostError
            raise kind(f"cannot be connected to: {type(error).__name__}: {error}") from None
        try:
            loaded = await peer.receive()
            if isinstance(loaded, Loaded):
                return cls(peer, loaded)
            raise ServerLostError(f"cannot be connected to: {loaded}")
        except BaseException as error:
            peer.abort()
            if isinstance(error, ValueError | PeerClosed):
                raise ServerLostError(f"cannot be connected to: {type(error).__name__}: {error}") from None
            raise

    @property
    def is_closed(self) -> bool:
        """Whether no further answer can arrive."""
        return self._receiving.done()

    async def generate(
        self, input_ids: list[int], sampling: SamplingParameters, seed: int, images: tuple[str, ...]
    ) -> Answer | None:
        """See `HFConnection.generate`."""
        number = next(self._numbers)
        answer = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self.peer.notify(Generate(number, input_ids, sampling, seed, images))
            return await answer
        except PeerClosed as error:
            raise _lost(error) from None
        except asyncio.CancelledError:
            with suppress(PeerClosed):
                self.peer.notify(Cancel(number))
            raise
        finally:
            self._requests.pop(number, None)

    async def _receive(self) -> None:
        try:
            while True:
                match await self.peer.receive():
                    case Finished() as finished:
                        self._finish(finished)
                    case Aborted(number) if (aborted := self._requests.get(number)) and not aborted.done():
                        aborted.set_result(None)
                    case Refused(number, text) if (refused := self._requests.get(number)) and not refused.done():
                        refused.set_exception(RequestRefusedError(text))
        except PeerClosed as error:
            lost = _lost(error)
        except (LookupError, TypeError, ValueError) as error:
            lost = ServerLostError(f"sent a malformed answer ({error!r})")
            self.peer.abort()
        for waiting in self._requests.values():
            if not waiting.done():
                waiting.set_exception(lost)

    def _finish(self, message: Finished) -> None:
        counts = message.counts
        size = 4 * sum(counts)
        view = memoryview(message.columns)
        tokens = array("q", view[:size].cast("i"))
        versions = array("i", bytes(view[size : 2 * size]))
        logprobs = array("f", bytes(view[2 * size : 3 * size]))
        sizes = [count * top for count, top in zip(counts, message.tops, strict=True)]
        top_size, view = 4 * sum(sizes), view[3 * size :]
        top_ids, top_logprobs = array("i", bytes(view[:top_size])), array("f", bytes(view[top_size : 2 * top_size]))
        prompt_size, view = 4 * sum(message.prompt_counts), view[2 * top_size :]
        prompt_logprobs = array("f", bytes(view[:prompt_size]))
        columns = (
            self._columns(message.computed, view[prompt_size:]) if self.loaded.experts_shape else [{}] * len(counts)
        )
        self._labels |= {message.oldest + index: label for index, label in enumerate(message.labels)}
        start = top_start = prompt_start = 0
        parts = zip(message.numbers, counts, sizes, message.prompt_counts, message.stopped, columns, strict=True)
        for number, count, top_count, prompt_count, stopped, column in parts:
            future = self._requests.get(number)
            end, top_end, prompt_end = start + count, top_start + top_count, prompt_start + prompt_count
            if future is not None and not future.done():
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                sampled = SampledTokens(
                    tokens[start:end],
                    logprobs[start:end],
                    versions[start:end],
                    top_ids[top_start:top_end],
                    top_logprobs[top_start:top_end],
                )
                of_prompt = prompt_logprobs[prompt_start:prompt_end].tolist()
                future.set_result((Generation.of(sampled, reason, column, of_prompt), self._labels))
            start, top_start, prompt_start = end, top_end, prompt_end

    def _columns(self, computed: list[int], data: memoryview) -> list[dict[str, Values]]:
        """Return the routed experts of each generation. No token predicts the first token, so its row is 0."""
        shape, dtype = self.loaded.experts_shape, self.loaded.experts_dtype
        experts = np.frombuffer(data, dtype).reshape(-1, *shape)
        first = np.zeros((1, *shape), dtype)
        per_generation = np.split(experts, np.cumsum(computed)[:-1])
        return [{ROUTED_EXPERTS: np.concatenate([first, rows])} for rows in per_generation]


def _lost(error: RunError) -> ServerLostError:
    return ServerLostError(f"closed the connection: {error.message}")
