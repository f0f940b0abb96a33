"""HTTP/1.1 to inference servers, and the base class of adapters whose servers speak it.

Each call has a deadline. Its error names what happened and never contains what was sent. The body of an answer is only
collected while it arrives, one callback a chunk, and decoded once the answer is complete or has broken off. A rollout
worker spends 0.24 ms on an answer this way. A general client (aiohttp), which wakes a coroutine for each chunk, needs
twice as long.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast
from urllib.parse import urlencode, urlsplit

import httptools
import msgspec

from areal_core.data import TokenIds
from areal_core.errors import writable
from areal_core.inference.adapter import ServerAdapter
from areal_core.inference.errors import RequestRefusedError
from areal_core.inference.settings import FleetSettings
from areal_core.interfaces.inference import ServerLostError, ServerUnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

KEEP_ALIVE_S = 2.0
"""Seconds for which an idle connection is used again. Servers close idle connections after five seconds (uvicorn, on
which vLLM and SGLang run). A request that meets the closing is lost, and only the caller could repeat it."""

_SHOWN_CHARACTERS = 300
"""Longest text of a server that an error repeats."""
_INPUT = re.compile(r"""['"]input['"]:""")
"""From here on an error body repeats the request, which areal cuts off."""
_ANY_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class ServerConnection:
    """Calls to one server. Opens as many sockets as there are concurrent calls, and keeps idle ones for the next.

    Args:
        address: `http://host:port`, or https, optionally with a path.
        api_key: sent as a bearer token if it is not empty.
        timeout_s: deadline of a call that has none of its own, and longest pause between two chunks of a stream.

    Example:
        >>> import asyncio
        >>> from areal_core.servers import ServerConnection, ServerLostError, ServerUnreachableError
        >>> async def state(address):
        ...     connection = ServerConnection(address, timeout_s=5.0)
        ...     try:
        ...         return await connection.get("/health")
        ...     except ServerUnreachableError:
        ...         return "its program has ended"
        ...     except ServerLostError as error:
        ...         return f"it may answer later: {error}"
        ...     finally:
        ...         connection.close()
        >>> asyncio.run(state("http://127.0.0.1:1"))
        'its program has ended'
    """

    def __init__(self, address: str, api_key: str = "", timeout_s: float = 60.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._url = urlsplit(address)
        headers = {"Host": self._url.netloc, "Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connecting: set[asyncio.Task[tuple[asyncio.Transport, _Socket]]] = set()
        self._busy: set[_Socket] = set()
        self._idle: list[_Socket] = []

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """Return the JSON value at `path`; None for an empty answer. Raises as `post`."""
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
        """Return the JSON value that answers `body`; None for an empty answer, and if the answer is not to be read.

        Args:
            path: appended to the address.
            body: sent as JSON.
            query: parameters in the URL.
            timeout_s: longest pause before and within the answer.
            is_json: whether to read the answer.

        Raises:
            RequestRefusedError: the server refuses the request (4xx).
            ServerLostError: it cannot be reached, is too slow, failed (5xx), or answered something else than JSON.
        """
        path = f"{path}?{urlencode(query)}" if query else path
        return await self._call(path, _encoded(body or {}), timeout_s, is_json=is_json)

    async def post_for_events(
        self, path: str, body: Mapping[str, Any], decoder: msgspec.json.Decoder[Any] = _ANY_JSON
    ) -> AsyncIterator[Any]:
        """Yield the server-sent events (`data: ...` lines) that answer `body`, up to `[DONE]`.

        They are yielded when the answer is complete. An answer that breaks off yields the events that have arrived,
        and then raises.

        Raises:
            RequestRefusedError: the server refuses the request.
            ServerLostError: the answer broke off, or an event is not what the decoder expects.
        """
        chunks: list[bytes] = []
        status, failure = 200, cast("BaseException | None", None)
        try:
            status = await self._send(path, _encoded(body), chunks, self._timeout_s)
        except (ServerLostError, asyncio.CancelledError) as error:
            failure = error
        data = b"".join(chunks)
        if status >= 400:
            raise _error_of(status, path, data)
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

    def close(self) -> None:
        """Cancel every call in progress. The next call connects again."""
        for connecting in self._connecting:
            connecting.cancel()
        self._connecting.clear()
        for socket in [*self._busy, *self._idle]:
            socket.close()
        self._idle.clear()

    async def _call(self, path: str, body: bytes | None, timeout_s: float | None, *, is_json: bool = True) -> Any:
        chunks: list[bytes] = []
        try:
            status = await self._send(path, body, chunks, timeout_s or self._timeout_s)
        except ServerLostError as error:
            raise type(error)(f"{path} {error}") from None
        data = b"".join(chunks).strip()
        if status >= 400:
            raise _error_of(status, path, data)
        try:
            return json.loads(data) if is_json and data else None
        except ValueError:
            raise ServerLostError(f"{path} was answered with something that is not JSON") from None

    async def _send(self, path: str, body: bytes | None, chunks: list[bytes], silence_s: float) -> int:
        """Return the status of the answer when it is complete.

        Args:
            path: appended to the address.
            body: JSON to POST; None for a GET.
            chunks: receives the body of the answer as it arrives.
            silence_s: seconds without a byte, or without a connection, after which the server counts as lost.

        Raises:
            ServerLostError: the answer broke off, or is not HTTP.
        """
        socket = await self._socket(silence_s)
        method, content = ("GET", b"") if body is None else ("POST", body)
        line = f"{method} {self._url.path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        self._busy.add(socket)
        try:
            return await socket.send(line.encode() + content, chunks, silence_s)
        finally:
            self._busy.discard(socket)
            if socket.is_reusable:
                self._idle.append(socket)
            else:
                socket.close()

    async def _socket(self, timeout_s: float) -> _Socket:
        while self._idle:
            if (idle := self._idle.pop()).is_reusable:
                return idle
            idle.close()
        is_secure = self._url.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            port = self._url.port or (443 if is_secure else 80)
            host, ssl = self._url.hostname or "", is_secure or None
            connecting = asyncio.ensure_future(loop.create_connection(_Socket, host, port, ssl=ssl))
            self._connecting.add(connecting)
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.wait([connecting])  # does not raise if `close` cancels the task
            finally:
                is_closed = connecting not in self._connecting
                self._connecting.discard(connecting)
                connecting.cancel()
            if is_closed and connecting.cancelled():
                raise ServerLostError("the connection was closed")
            _, socket = connecting.result()
        except (OSError, TimeoutError, ValueError) as error:
            kind = ServerUnreachableError if isinstance(error, ConnectionRefusedError) else ServerLostError
            raise kind(f"cannot be connected to: {type(error).__name__}: {error}") from None
        if is_closed:  # `close` came between the connection and this call
            socket.close()
            raise ServerLostError("the connection was closed")
        return socket


class _Socket(asyncio.Protocol):
    """One socket with one request at a time. asyncio calls the methods of `asyncio.Protocol`; httptools those that
    begin with `on_`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._received_at = 0.0
        self._status: asyncio.Future[int] = self._loop.create_future()

    async def send(self, request: bytes, chunks: list[bytes], silence_s: float) -> int:
        """See `ServerConnection._send`."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks = chunks
        self._silence_s = silence_s
        self._received_at = self._loop.time()
        self._status = self._loop.create_future()
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)
        self._transport.write(request)
        try:
            return await self._status
        finally:
            self._timer.cancel()

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer is complete, and another request may follow it."""
        is_complete = self._status.done() and not self._status.cancelled() and self._status.exception() is None
        return is_complete and not self._transport.is_closing() and self._loop.time() - self._received_at < KEEP_ALIVE_S

    def close(self, reason: str = "the connection was closed") -> None:
        """Abort the connection. A request in progress fails with the reason."""
        self._transport.abort()
        if not self._status.done():
            self._status.set_exception(ServerLostError(reason))

    def _check_silence(self) -> None:
        remaining_s = self._received_at + self._silence_s - self._loop.time()
        if remaining_s <= 0:
            self.close("was not answered in time")
        else:
            self._timer = self._loop.call_later(remaining_s, self._check_silence)

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"was answered with something that is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.close(f"the server closed the connection{f': {error}' if error else ''}")

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        if not self._status.done():
            self._status.set_result(self._parser.get_status_code())
        if not self._parser.should_keep_alive():
            self._transport.close()


class HTTPAdapter(ServerAdapter):
    """The base of adapters for servers that speak HTTP; see `ServerAdapter` for what is left to implement.

    Attributes:
        health_path: URL path that answers while the server is alive; see `ServerAdapter.check_health`.
    """

    Config: ClassVar[type[FleetSettings]] = FleetSettings
    settings: FleetSettings
    health_path = "/health"

    def connect(self, address: str) -> ServerConnection:
        """Return a connection that sends the fleet's key."""
        return ServerConnection(address, self.settings.key, self.settings.silence_timeout_s)

    async def check_health(self, connection: ServerConnection, timeout_s: float) -> None:
        """Get `health_path`."""
        await connection.get(self.health_path, timeout_s)


def raise_refusal(error: Mapping[str, Any]) -> NoReturn:
    """Raise the error that a server sent within a stream: `{"code": ..., "message": ..., "retryable": ...}`.

    Raises:
        RequestRefusedError: the server refuses the request.
        ServerLostError: the server failed.

    Example:
        >>> from areal_core.servers import RequestRefusedError, raise_refusal
        >>> try:
        ...     raise_refusal({"code": 400, "message": "the prompt is too long"})
        ... except RequestRefusedError as error:
        ...     print(error.status, error)
        400 the answer broke off: the prompt is too long
    """
    message = f"the answer broke off: {_message_in(json.dumps(error))}"
    code = str(error.get("code"))
    status = int(code) if code.isdecimal() else 500  # a word, such as `invalid_request_error`, names no status
    if 400 <= status < 500 and not error.get("retryable"):
        raise RequestRefusedError(message, status)
    raise ServerLostError(message)


def _encoded(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body, enc_hook=TokenIds.json)


def _error_of(status: int, path: str, data: bytes) -> Exception:
    message = _message_in(data.decode(errors="replace"))
    # 408 and 429 mean "not now", and another server may answer.
    if status < 500 and status not in (408, 429):
        return RequestRefusedError(f"{path} was refused ({status}): {message}", status)
    return ServerLostError(f"{path} failed ({status}): {message}")


def _message_in(text: str) -> str:
    """Return the message of an error body, without the request that some servers repeat in it.

    Half of a surrogate pair in it is replaced, because messages of a run could not carry it.
    """
    text = _INPUT.split(text)[0] if not text.startswith("{") else text
    try:
        value = json.loads(text)
    except ValueError:
        return writable(" ".join(text.split())[:_SHOWN_CHARACTERS] or "no message")
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail", "msg") if value.get(key)), "no message")
    if isinstance(value, list):
        value = "; ".join(str(item.get("msg", "")) if isinstance(item, dict) else "" for item in value)
    return writable(" ".join(_INPUT.split(str(value))[0].split())[:_SHOWN_CHARACTERS])
