"""HTTP endpoint that agents call. Each process that runs episodes has one.

The module of the protocol parses a request, the session of its key generates the answer, and the module writes the
response. If a response cannot be delivered, its answer is discarded: the agent never saw it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from areal_agents import anthropic_messages, openai_chat, openai_responses, token_generate
from areal_agents.requests import REQUESTS, RefusedError
from areal_agents.streams import AnswerStream
from areal_core.chat import ROLES, read_json
from areal_core.errors import RunError
from areal_core.processes import http_address
from areal_core.sdk import Endpoint, RowError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from aiohttp.typedefs import Handler

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event
    from areal_agents.requests import AgentRequest
    from areal_agents.session import Session

logger = logging.getLogger(__name__)

LARGEST_BODY: Final = 8 * 2**20
"""Limit of a request body in bytes: about two million tokens as text, or one million as numbers. Parsing JSON holds the
GIL, in any thread, so a larger body would block all episodes of the process."""
LONG_BODY: Final = 2**16
"""Bodies of this many characters or more are parsed in a thread instead of on the event loop."""
PING_S: Final = 10.0
"""Seconds between comments in a stream that waits for its answer. Clients time out after minutes of silence."""
ENDED_KEYS: Final = 10_000
"""Number of keys of ended episodes that are kept, to tell them from unknown keys in errors."""


class AgentProtocol(Protocol):
    """Functions that the module of a protocol provides."""

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        """Parse a request."""

    def write(self, body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
        """Return the complete response."""

    def stream(self, body: Mapping[str, Any], answers: AnswerStream, reader: AnswerReader) -> AsyncIterator[Event]:
        """Yield the same response as stream events, while the answers are generated."""


class AgentEndpoint:
    """Serves the sessions of one process over HTTP.

    Args:
        host: address on which it listens.
        reader: parser of answers.
        session_header: header with the identifier by which an environment tells its agents apart; empty for none.
        refuses_other_sampling: whether to refuse requests with options that the endpoint does not honor.
        on_other_sampling: called with a message about each such option, once.
    """

    def __init__(
        self,
        host: str,
        reader: AnswerReader,
        *,
        session_header: str = "",
        refuses_other_sampling: bool = False,
        on_other_sampling: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._host = host
        self._reader = reader
        self._session_header = session_header
        self._refuses = refuses_other_sampling
        self._on_other_sampling = on_other_sampling
        self._reported: set[str] = set()
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Start listening on a free port."""
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=[_write_errors])
        for path, protocol in PROTOCOLS.items():
            application.router.add_post(path, partial(self._answer, protocol))
        application.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/v1/models/{name}", self._models)
        # A client that disconnects cancels its handler, which cancels the generation.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, session: Session) -> Endpoint:
        """Add a session and return its endpoint."""
        self._sessions[session.key] = session
        return Endpoint(f"{http_address(self._host, self._port)}/v1", session.key)

    def end(self, session: Session) -> None:
        """Remove a session, so that its key is refused, and close it; see `Session.close`."""
        del self._sessions[session.key]
        self._ended[session.key] = None
        while len(self._ended) > ENDED_KEYS:
            self._ended.popitem(last=False)
        session.close()

    def _session_of(self, request: web.Request, model: str = "") -> Session:
        """Return the session whose key is in a header, or behind the name of the requested model: `NAME@KEY`."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = [key for key in (bearer, request.headers.get("x-api-key", ""), model.rpartition("@")[2]) if key]
        session = next((self._sessions[key] for key in keys if key in self._sessions), None)
        if session is None:
            has_ended = bool(self._ended.keys() & keys)
            message = "this key's episode has ended" if has_ended else "this key belongs to no episode"
            raise RefusedError(message, 401, "invalid_api_key")
        return session

    async def _answer(self, protocol: AgentProtocol, request: web.Request) -> web.StreamResponse:
        body, parsed = await _read(request, protocol)
        model = parsed.model
        session = self._session_of(request, model)
        sender = request.headers.get(self._session_header, "") if self._session_header else ""
        parsed = replace(parsed, model=model.removesuffix(f"@{session.key}"), session=sender)
        session.counts[REQUESTS[request.path]] += 1
        session.counts["streamed_requests"] += bool(body.get("stream"))
        self._check_options(parsed)
        prompt = await session.place(parsed)
        # Look up the session again: the episode may have ended during the awaits.
        session = self._session_of(request, model)
        if body.get("stream"):
            answers = AnswerStream(session, parsed, prompt, self._reader)
            response, answering = self._stream(protocol, request, body, answers, session), answers.answering
        else:
            answering = session.start(parsed, prompt)
            response = self._whole(protocol, request, body, answering)
        try:
            return await response
        except BaseException as error:
            answering.cancel()
            if answering.done() and not answering.cancelled() and answering.exception() is None:
                session.lose(answering.result())
            elif not isinstance(error, (RefusedError, RunError)):
                session.counts["lost_answers"] += parsed.count
            raise

    async def _whole(
        self,
        protocol: AgentProtocol,
        request: web.Request,
        body: Mapping[str, Any],
        answering: asyncio.Task[list[Turn]],
    ) -> web.StreamResponse:
        response = web.json_response(protocol.write(body, await answering, self._reader))
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(
        self,
        protocol: AgentProtocol,
        request: web.Request,
        body: Mapping[str, Any],
        answers: AnswerStream,
        session: Session,
    ) -> web.StreamResponse:
        """Stream the answers as they are generated, and comments while there is nothing to send.

        An error before the first text still becomes an HTTP status if it comes within `PING_S` seconds. An answer whose
        stream ends with an error is discarded.
        """

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def lines() -> AsyncGenerator[str, None]:
            try:
                await answers.begin()
                async for name, data in protocol.stream(body, answers, self._reader):
                    yield (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}"
                if protocol is openai_chat:
                    yield f"data: {openai_chat.ENDED}"
            except (RefusedError, RunError) as error:
                if not response.prepared:
                    raise
                if not answers.answering.cancelled() and answers.answering.exception() is None:
                    session.lose(answers.turns)
                yield f"event: error\ndata: {json.dumps(_problem(request, as_refused(error)))}"

        async with aclosing(lines()) as written:
            line: asyncio.Future[str] = asyncio.ensure_future(anext(written))
            try:
                while not answers.answering.done():
                    ends: set[asyncio.Future[Any]] = {line, answers.answering}
                    await asyncio.wait(ends, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                    if answers.answering.done():
                        break
                    text = line.result() if line.done() else ": waiting"
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(f"{text}\n\n".encode())
                    if line.done():
                        line = asyncio.ensure_future(anext(written))
                # Clients close the connection at the last line, which would cancel this handler and discard the answer:
                # everything that is left is sent at once, and nothing waits afterwards.
                rest = [await line]
                rest += [text async for text in written]
            finally:
                line.cancel()
                await asyncio.wait({line})
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof("".join(f"{text}\n\n" for text in rest).encode())
        return response

    def _check_options(self, parsed: AgentRequest) -> None:
        """Refuse options that the endpoint does not honor, or report each of them once."""
        if self._refuses and parsed.not_honored:
            message = f"the endpoint does not honor {', '.join(parsed.not_honored)}: sampling is the run's"
            raise RefusedError(f"{message}, and workflow.other_sampling is 'refuse'", code="other_sampling")
        if new := [name for name in parsed.not_honored if name not in self._reported]:
            self._reported.update(new)
            self._on_other_sampling(
                f"agents ask for {', '.join(new)}, which the endpoint does not honor: sampling is the run's"
            )

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        _, parsed = await _read(request, anthropic_messages)
        session = self._session_of(request, parsed.model)
        return web.json_response({"input_tokens": len((await session.find_place(parsed)).ids)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        session, name = self._session_of(request), request.match_info.get("name")
        model = {"id": name or "policy", "object": "model", "owned_by": "areal", "created": 0}
        model |= {"type": "model", "display_name": model["id"], "max_model_len": session.max_tokens}
        return web.json_response(model if name else {"object": "list", "data": [model], "has_more": False})


PROTOCOLS: Final = dict(zip(REQUESTS, (openai_chat, openai_responses, anthropic_messages, token_generate), strict=True))


@web.middleware
async def _write_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write every error in the format of the protocol, including errors of the web server."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        message = (
            f"{request.method} {request.path:.200}: {error.text}; the endpoint serves {', '.join(PROTOCOLS)} and "
            "/v1/models"
        )
        refused = RefusedError(message, error.status, error.reason.lower().replace(" ", "_"))
    except (RefusedError, RunError) as error:
        refused = as_refused(error)
    except ConnectionResetError:
        refused = RefusedError("the client has closed the connection", 499, "client_closed_request")
    except Exception as error:
        logger.exception("the agents' endpoint failed at %s", request.path)
        refused = RefusedError(f"the endpoint failed: {error!r}", 500, "internal_error")
    return web.json_response(_problem(request, refused), status=refused.status)


def _problem(request: web.Request, refused: RefusedError) -> dict[str, Any]:
    is_anthropic = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return (anthropic_messages if is_anthropic else openai_chat).problem(refused)


async def _read(request: web.Request, protocol: AgentProtocol) -> tuple[dict[str, Any], AgentRequest]:
    try:
        text = await request.text()
    except (ValueError, LookupError, web.RequestPayloadError) as error:  # wrong charset or content encoding
        raise RefusedError(f"the body cannot be read as JSON: {error}") from error
    return _parse(text, protocol) if len(text) < LONG_BODY else await asyncio.to_thread(_parse, text, protocol)


def _parse(text: str, protocol: AgentProtocol) -> tuple[dict[str, Any], AgentRequest]:
    try:
        body = read_json(text)
    except ValueError as error:
        raise RefusedError(f"the body cannot be read as JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be an object")
    try:
        parsed = protocol.read(body)
    except RowError as error:
        raise RefusedError(str(error)) from error
    for number, message in enumerate(parsed.messages):
        if message["role"] not in ROLES.values():
            roles = ", ".join(dict.fromkeys(ROLES.values()))
            raise RefusedError(f"message {number} has the role {message['role']!r:.40}; it must be one of {roles}")
    return body, parsed


def as_refused(error: RefusedError | RunError) -> RefusedError:
    """Return an error as the refusal that the agent gets. A RunError becomes status 503."""
    return error if isinstance(error, RefusedError) else RefusedError(f"the run has ended: {error}", 503, "run_ended")
