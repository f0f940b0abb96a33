"""HTTP to one server: a deadline on every call, and errors that say what happened and never hold a payload."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import urlencode

import msgspec

from areal_core.data import TokenIds
from areal_core.errors import writable
from areal_core.interfaces import ServerLostError
from areal_core.servers.errors import RequestRefusedError
from areal_core.servers.exchange import Exchanges

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from areal_core.servers.settings import FleetSettings

_SHOWN = 300
_INPUT = re.compile(r"""['"]input['"]:""")
"""Behind this a server repeats what it was sent."""
_ANYTHING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _encoded(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body, enc_hook=TokenIds.json)


class ServerConnection:
    """Calls to one server.

    Args:
        address: `http://host:port`.
        api_key: sent as bearer token where it is not empty.
        timeout_s: of a call that does not say its own, and longest silence of a stream.
    """

    def __init__(self, address: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        self.address = address
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._exchanges = Exchanges(address, headers)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON value at `path`; None for an empty answer."""
        return await self._call(path, None, timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        is_json: bool = True,
    ) -> Any:
        """The JSON value that answers `body`; None for an empty answer, and for one that is not meant to be JSON."""
        path = f"{path}?{urlencode(query)}" if query else path
        return await self._call(path, _encoded(body or {}), timeout_s, is_json=is_json)

    async def post_for_events(
        self, path: str, body: Mapping[str, Any], decoder: msgspec.json.Decoder[Any] = _ANYTHING
    ) -> AsyncIterator[Any]:
        """Yield the events (`data: ...` lines) of a server-sent answer, until `[DONE]`, when the answer is complete.

        An answer that breaks off yields the events that came before, and then raises.

        Raises:
            RequestRefusedError: the server refuses the request.
            ServerLostError: the answer broke off, or is not of this form.
        """
        heard: list[bytes] = []
        status, failure = 200, cast("BaseException | None", None)
        try:
            status = await self._exchanges.ask(path, _encoded(body), heard, self._timeout_s)
        except (ServerLostError, asyncio.CancelledError) as error:
            failure = error
        data = b"".join(heard)
        if status >= 400:
            raise self._refusal(status, path, data.decode(errors="replace"))
        try:
            for line in data.splitlines(keepends=True):
                if line.startswith(b"data:") and line.endswith(b"\n"):
                    if (text := line[5:].strip()) == b"[DONE]":
                        break
                    yield decoder.decode(text)
            else:
                failure = failure or ServerLostError("ended before the answer did")
        except msgspec.DecodeError as error:
            failure = failure or ServerLostError(f"was answered with something that is not JSON of its form: {error}")
        if isinstance(failure, asyncio.CancelledError):
            raise failure
        if failure is not None:
            raise ServerLostError(f"{path} {failure}")

    async def _call(self, path: str, body: bytes | None, timeout_s: float | None, *, is_json: bool = True) -> Any:
        heard: list[bytes] = []
        try:
            status = await self._exchanges.ask(path, body, heard, timeout_s or self._timeout_s)
        except ServerLostError as error:
            raise type(error)(f"{path} {error}") from None
        data = b"".join(heard).strip()
        if status >= 400:
            raise self._refusal(status, path, data.decode(errors="replace"))
        try:
            return json.loads(data) if is_json and data else None
        except ValueError:
            raise ServerLostError(f"{path} was answered with something that is not JSON") from None

    @staticmethod
    def _refusal(status: int, path: str, text: str) -> Exception:
        # 408 and 429 say "not now", not "never".
        if status < 500 and status not in (408, 429):
            return RequestRefusedError(f"{path} was refused ({status}): {_words(text)}", status)
        return ServerLostError(f"{path} failed ({status}): {_words(text)}")

    def close(self) -> None:
        """Break off everything under way; the next call opens a new connection."""
        self._exchanges.close()


class HTTPAdapter:
    """What adapters of servers that speak HTTP derive from; see `ServerAdapter`.

    Attributes:
        health_path: answers while the server lives; see `ServerAdapter.check_health`.
    """

    health_path = "/health"

    def connect(self, address: str, settings: FleetSettings) -> ServerConnection:
        """With the fleet's key."""
        return ServerConnection(address, settings.key, settings.silence_timeout_s)

    async def check_health(self, connection: ServerConnection, timeout_s: float) -> None:
        """By `health_path`."""
        await connection.get(self.health_path, timeout_s)


def raise_refusal(error: Mapping[str, Any]) -> NoReturn:
    """Raise what a server says in the middle of a stream: `{"code": ..., "message": ..., "retryable": ...}`.

    Raises:
        RequestRefusedError: the request is wrong.
        ServerLostError: the server is.
    """
    words = f"the answer broke off: {_words(json.dumps(error))}"
    code = int(error.get("code") or 500)
    if 400 <= code < 500 and not error.get("retryable"):
        raise RequestRefusedError(words, code)
    raise ServerLostError(words)


def _words(text: str) -> str:
    """What a server says in an error, without what it was sent; half a character in it cannot be sent on."""
    text = _INPUT.split(text)[0] if not text.startswith("{") else text
    try:
        value = json.loads(text)
    except ValueError:
        return writable(" ".join(text.split())[:_SHOWN] or "no words")
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail", "msg") if value.get(key)), "no words")
    if isinstance(value, list):
        value = "; ".join(str(item.get("msg", "")) if isinstance(item, dict) else "" for item in value)
    return writable(" ".join(_INPUT.split(str(value))[0].split())[:_SHOWN])
