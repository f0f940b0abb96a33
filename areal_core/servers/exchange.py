"""HTTP/1.1 whose answers are only collected while they come.

A chunk costs one callback on its way, where a general client wakes a coroutine for it. What it holds is read by whoever
asked, once, when the answer is over or has broken off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from areal_core.interfaces import ServerLostError, ServerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEEP_ALIVE_S = 2.0
"""A connection that was idle for longer is not used again. Servers close idle ones after five seconds (uvicorn, which
vLLM and SGLang run on); a question on one that is being closed just then is lost, and none but the caller could send it
again."""


class _Exchange(asyncio.Protocol):
    """A connection with one question at a time; the event loop calls it, and the parser what begins with `on_`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard: list[bytes] = []
        self._heard_at = 0.0
        self._status: asyncio.Future[int] = self._loop.create_future()

    async def ask(self, question: bytes, heard: list[bytes], silence_s: float) -> int:
        self._parser = httptools.HttpResponseParser(self)
        self._heard, self._heard_at, self._silence_s = heard, self._loop.time(), silence_s
        self._status = self._loop.create_future()
        self._timer = self._loop.call_later(self._silence_s, self._watch)
        self._transport.write(question)
        try:
            return await self._status
        finally:
            self._timer.cancel()

    @property
    def can_be_used(self) -> bool:
        """Whether the last answer is over, and another question may follow it."""
        is_over = self._status.done() and not self._status.cancelled() and self._status.exception() is None
        return is_over and not self._transport.is_closing() and self._loop.time() - self._heard_at < KEEP_ALIVE_S

    def close(self, why: str = "the connection was closed") -> None:
        self._transport.abort()
        if not self._status.done():
            self._status.set_exception(ServerLostError(why))

    def _watch(self) -> None:
        left = self._heard_at + self._silence_s - self._loop.time()
        if left <= 0:
            self.close("was not answered in time")
        else:
            self._timer = self._loop.call_later(left, self._watch)

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"was answered with something that is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.close(f"the server closed the connection{f': {error}' if error else ''}")

    def on_body(self, data: bytes) -> None:
        self._heard.append(data)

    def on_message_complete(self) -> None:
        if not self._status.done():
            self._status.set_result(self._parser.get_status_code())
        if not self._parser.should_keep_alive():
            self._transport.close()


class Exchanges:
    """The connections to one server.

    Args:
        address: `http://host:port`, or https, perhaps with a path.
        headers: of every question.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address = urlsplit(address)
        head = {"Host": self._address.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self._busy: set[_Exchange] = set()
        self._idle: list[_Exchange] = []

    async def ask(self, path: str, body: bytes | None, heard: list[bytes], silence_s: float) -> int:
        """The status of the answer, when it is over.

        Args:
            path: behind the address.
            body: JSON to POST; None for a GET.
            heard: the answer's body is put here, as it comes.
            silence_s: an answer of which nothing comes for so long counts as lost, as does a server that cannot be
                connected to for so long.

        Raises:
            ServerLostError: the answer broke off, or was none.
        """
        exchange = await self._connection(silence_s)
        method, body = ("GET", b"") if body is None else ("POST", body)
        line = f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._busy.add(exchange)
        try:
            return await exchange.ask(line.encode() + body, heard, silence_s)
        finally:
            self._busy.discard(exchange)
            if exchange.can_be_used:
                self._idle.append(exchange)
            else:
                exchange.close()

    async def _connection(self, patience_s: float) -> _Exchange:
        while self._idle:
            if (exchange := self._idle.pop()).can_be_used:
                return exchange
            exchange.close()
        where, loop = self._address, asyncio.get_running_loop()
        is_secure = where.scheme == "https"
        try:
            async with asyncio.timeout(patience_s):
                port = where.port or (443 if is_secure else 80)
                host, ssl = where.hostname or "", is_secure or None
                _, exchange = await loop.create_connection(_Exchange, host, port, ssl=ssl)
        except (OSError, TimeoutError, ValueError) as error:
            kind = ServerUnreachableError if isinstance(error, ConnectionRefusedError) else ServerLostError
            raise kind(f"cannot be connected to: {type(error).__name__}: {error}") from None
        return exchange

    def close(self) -> None:
        """Break off everything under way."""
        for exchange in [*self._busy, *self._idle]:
            exchange.close()
        self._idle.clear()
