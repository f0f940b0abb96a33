"""The connection to a server: in each rollout worker, and in the controller."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from areal_core.background import start_task
from areal_core.data import Generation, SampledTokens
from areal_core.data.trajectory import FinishReason
from areal_core.interfaces import ServerLostError, ServerUnreachableError
from areal_core.messages import Credentials, Peer, PeerClosed, connect_once
from areal_core.servers.errors import RequestRefusedError
from areal_core.servers.experts import ROUTED_EXPERTS
from areal_hf.messages import Aborted, Cancel, Finished, Generate, Loaded, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data.trajectory import Values
    from areal_core.errors import RunError
    from areal_core.interfaces import SamplingParameters
    from areal_core.messages import Message

    Answer = tuple[Generation, Mapping[int, str]]
    """What was generated, with the numbers of weights for versions; and the labels of these."""


class HFConnection:
    """See `areal_core.servers.interface.Connection`.

    Args:
        address: of the server.
        key: that it asks for; empty for none.
    """

    def __init__(self, address: str, key: str = "") -> None:
        self.address = address
        self._key = key
        self._opening: asyncio.Future[_Line] | None = None

    async def loaded(self) -> Loaded:
        """What the server is."""
        return (await self._line()).loaded

    async def ask(self, message: Message) -> None:
        """Have the server do something.

        Raises:
            RunError: it says that it did not.
        """
        line = await self._line()
        try:
            await line.peer.request(message, None, "what it was asked for")
        except PeerClosed as error:
            raise _lost(error) from None

    async def generate(
        self, input_ids: list[int], sampling: SamplingParameters, seed: int, images: tuple[str, ...]
    ) -> Answer | None:
        """Continue one sequence; None where somebody has ended all requests."""
        return await (await self._line()).generate(input_ids, sampling, seed, images)

    def close(self) -> None:
        """See `Connection.close`."""
        opening, self._opening = self._opening, None
        if opening is None or opening.cancel():
            return
        if not opening.cancelled() and opening.exception() is None:
            opening.result().peer.abort()

    async def _line(self) -> _Line:
        known = self._opening
        if known is None or (known.done() and (known.cancelled() or known.exception() or known.result().is_over)):
            known = self._opening = asyncio.ensure_future(_Line.open(self.address, Credentials(self._key)))
        try:
            return await asyncio.shield(known)
        except asyncio.CancelledError:
            if known.cancelled():
                raise ServerLostError("the connection was closed") from None
            raise


class _Line:
    """A connection that stands.

    Args:
        peer: the server.
        loaded: what it is.
    """

    def __init__(self, peer: Peer, loaded: Loaded) -> None:
        self.peer = peer
        self.loaded = loaded
        self._numbers = itertools.count(1)
        self._labels: dict[int, str] = {}
        self._asked: dict[int, asyncio.Future[Answer | None]] = {}
        self._receiving = start_task(self._receive(), "answers of a server")

    @classmethod
    async def open(cls, address: str, credentials: Credentials) -> _Line:
        """Connect.

        Raises:
            ServerLostError: the server is gone, or lets nobody in who comes with this key.
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
    def is_over(self) -> bool:
        """Whether nothing will be answered any more."""
        return self._receiving.done()

    async def generate(
        self, input_ids: list[int], sampling: SamplingParameters, seed: int, images: tuple[str, ...]
    ) -> Answer | None:
        """See `HFConnection.generate`."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
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
            self._asked.pop(number, None)

    async def _receive(self) -> None:
        try:
            while True:
                match await self.peer.receive():
                    case Finished() as finished:
                        self._finish(finished)
                    case Aborted(number) if (aborted := self._asked.get(number)) and not aborted.done():
                        aborted.set_result(None)
                    case Refused(number, text) if (refused := self._asked.get(number)) and not refused.done():
                        refused.set_exception(RequestRefusedError(text))
        except PeerClosed as error:
            lost = _lost(error)
        except (LookupError, TypeError, ValueError) as error:
            lost = ServerLostError(f"sent an answer that makes no sense ({error!r})")
            self.peer.abort()
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(lost)

    def _finish(self, message: Finished) -> None:
        counts = message.counts
        size = 4 * sum(counts)
        view = memoryview(message.columns)
        tokens = array("q", view[:size].cast("i"))
        versions, logprobs = array("i", bytes(view[size : 2 * size])), array("f", bytes(view[2 * size : 3 * size]))
        columns = self._columns(message.computed, view[3 * size :]) if self.loaded.experts_shape else [{}] * len(counts)
        self._labels |= {message.oldest + place: label for place, label in enumerate(message.labels)}
        start = 0
        for number, count, stopped, told in zip(message.numbers, counts, message.stopped, columns, strict=True):
            future = self._asked.get(number)
            end = start + count
            if future is not None and not future.done():
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                sampled = SampledTokens(tokens[start:end], logprobs[start:end], versions[start:end])
                future.set_result((Generation.of(sampled, reason, told), self._labels))
            start = end

    def _columns(self, computed: list[int], data: memoryview) -> list[dict[str, Values]]:
        """Of each generation, the experts by which its tokens were predicted; nothing predicts the first."""
        shape, dtype = self.loaded.experts_shape, self.loaded.experts_dtype
        told = np.frombuffer(data, dtype).reshape(-1, *shape)
        first = np.zeros((1, *shape), dtype)
        return [{ROUTED_EXPERTS: np.concatenate([first, each])} for each in np.split(told, np.cumsum(computed)[:-1])]


def _lost(error: RunError) -> ServerLostError:
    return ServerLostError(f"broke off: {error.message}")
