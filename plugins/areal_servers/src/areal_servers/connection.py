"""HTTP to one server: a deadline on every call, and errors that say what happened and never hold a payload."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp
import msgspec

from areal_core.interfaces import ServerLostError
from areal_servers.errors import RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

KEEP_ALIVE_S = 2.0
"""A connection that was idle for longer is not used again. Servers close idle ones after five seconds (uvicorn, which
vLLM and SGLang run on); a call on one that is being closed just then is lost, and none but the caller could send it
again."""

_SHOWN = 300
_INPUT = re.compile(r"""['"]input['"]:""")
"""Behind this a server repeats what it was sent."""
_FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError, RuntimeError, msgspec.DecodeError)
"""RuntimeError: the library tries a call again by itself, and may find its session closed by then."""


class ServerConnection:
    """Calls to one server.

    Args:
        address: `http://host:port`.
        api_key: sent as bearer token where it is not empty.
        timeout_s: of a call that does not say its own, and longest silence of a stream.
    """

    def __init__(self, address: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON value at `path`; None for an empty answer."""
        return await self._call("GET", path, timeout_s)

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
        return await self._call("POST", path, timeout_s, is_json=is_json, json=body or {}, params=query)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The JSON values of an event stream (`data: ...` lines), until `[DONE]`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s)
        try:
            async with self._open().post(self.address + path, json=body, timeout=timeout) as response:
                await self._check(response, path)
                async for line in response.content:
                    if line.startswith(b"data:"):
                        text = line[5:].strip()
                        if text == b"[DONE]":
                            return
                        yield msgspec.json.decode(text)
        except _FAULTS as error:
            raise self._translated(error, path) from None
        raise ServerLostError(f"{path} ended before the answer did")

    async def _call(self, method: str, path: str, timeout_s: float | None, is_json: bool = True, **sent: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        try:
            async with self._open().request(method, self.address + path, timeout=timeout, **sent) as response:
                await self._check(response, path)
                data = await response.read()
                return json.loads(data) if is_json and data.strip() else None
        except _FAULTS as error:
            raise self._translated(error, path) from None

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        status = response.status
        if status < 400:
            return
        words = _words(await response.text(errors="replace"))
        # 408 and 429 say "not now", not "never".
        if status < 500 and status not in (408, 429):
            raise RequestRefusedError(f"{path} was refused ({status}): {words}")
        raise ServerLostError(f"{path} failed ({status}): {words}")

    @staticmethod
    def _translated(error: Exception, path: str) -> Exception:
        match error:
            case RequestRefusedError():
                return error
            case TimeoutError():
                return ServerLostError(f"{path} was not answered in time")
            case aiohttp.ClientError() | OSError() | RuntimeError():
                return ServerLostError(f"{path}: {type(error).__name__}: {str(error)[:_SHOWN]}")
        return ServerLostError(f"{path} was answered with something that is not JSON")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Limits are the fleet's; a line of a stream may hold thousands of tokens.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, read_bufsize=1 << 22)
        return self._session

    async def close(self) -> None:
        """Break off everything under way; the next call opens a new connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)


def raise_told(error: Mapping[str, Any]) -> NoReturn:
    """Raise what a server says in the middle of a stream: `{"code": ..., "message": ..., "retryable": ...}`.

    Raises:
        RequestRefusedError: the request is wrong.
        ServerLostError: the server is.
    """
    words = f"the answer broke off: {_words(json.dumps(error))}"
    code = int(error.get("code") or 500)
    if 400 <= code < 500 and not error.get("retryable"):
        raise RequestRefusedError(words)
    raise ServerLostError(words)


def _words(text: str) -> str:
    """What a server says in an error, without what it was sent."""
    text = _INPUT.split(text)[0] if not text.startswith("{") else text
    try:
        value = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:_SHOWN] or "no words"
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail", "msg") if value.get(key)), "no words")
    if isinstance(value, list):
        value = "; ".join(str(item.get("msg", "")) if isinstance(item, dict) else "" for item in value)
    return " ".join(_INPUT.split(str(value))[0].split())[:_SHOWN]
