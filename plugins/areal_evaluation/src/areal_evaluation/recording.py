"""Proxy between agents and the endpoint: it hides the API key, limits the waiting time, and records every request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from aiohttp import web

from areal_core.sdk import Endpoint
from areal_evaluation.address import shorten
from areal_evaluation.transcripts import Transcript, answers_of, whole_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_evaluation.address import Address

FORWARDED_REQUEST_HEADERS: Final = ("content-type", "anthropic-version", "anthropic-beta")
"""Headers of a request that are forwarded to the endpoint."""
FORWARDED_ANSWER_HEADERS: Final = ("Content-Type", "Retry-After", "retry-after-ms", "x-should-retry", "x-request-id")
"""Headers of an answer that are forwarded to the agent."""
LARGEST_BODY: Final = 64 * 2**20
"""Limit in bytes of a request and of an answer."""
CUT_OFF: Final = ("length", "max_tokens", "incomplete", "max_output_tokens")
"""Finish reasons of the protocols for an answer that reached its length limit."""


@dataclass(slots=True)
class Recording:
    """One episode, as the model sees it.

    Attributes:
        endpoint: endpoint that the agent gets.
        transcript: messages of all requests and answers.
        agent_ids: model names that the agent requested. The same model answers all of them.
        answers: number of answers of the model.
        calls: number of tool calls in the answers.
        failed_requests: number of requests without a proper answer.
        fault: what was wrong with the last request; empty if it was answered.
        last: text of the last answer.
        is_truncated: whether the last answer reached its length limit.
        tokens: tokens of all answers, as the endpoint counts them; None if it does not.
        prompt_tokens: tokens of all prompts, as the endpoint counts them; None if it does not.
        answering_s: seconds that requests took, summed over concurrent ones.
        active_tasks: tasks of requests that are not answered yet.
    """

    endpoint: Endpoint
    transcript: Transcript = field(default_factory=Transcript)
    agent_ids: set[str] = field(default_factory=set)
    answers: int = 0
    calls: int = 0
    failed_requests: int = 0
    fault: str = ""
    last: str = ""
    is_truncated: bool = False
    tokens: int | None = 0
    prompt_tokens: int | None = 0
    answering_s: float = 0.0
    active_tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def add_answer(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Record an answered request."""
        messages = answers_of(answer)
        self.transcript.add(asked, messages)
        self.fault = ""
        self.answers += 1
        self.calls += sum(len(message.get("calls", ())) for message in messages)
        self.last = next((message["text"] for message in reversed(messages) if message["text"]), "")
        choices = [choice for choice in answer.get("choices") or () if isinstance(choice, dict)]
        reasons = [choice.get("finish_reason") for choice in choices]
        self.is_truncated = any(r in CUT_OFF for r in (*reasons, answer.get("stop_reason"), answer.get("status")))
        usage = answer.get("usage") or {}
        self.tokens = _added(self.tokens, usage, "completion_tokens", "output_tokens")
        self.prompt_tokens = _added(self.prompt_tokens, usage, "prompt_tokens", "input_tokens")

    def add_failure(self, asked: Mapping[str, Any], fault: str) -> None:
        """Record a request without a proper answer. An empty request, such as one for the models, is not recorded."""
        if asked:
            self.transcript.add(asked, [{"role": "endpoint", "text": fault}])
            self.failed_requests += 1
            self.fault = fault

    def metrics(self) -> dict[str, float]:
        """Return the counts of the episode, whether it succeeded or not."""
        counted = {
            "agents/turns": self.answers,
            "agents/calls": self.calls,
            "agents/generating_s": self.answering_s,
            "agents/failed_requests": self.failed_requests,
            "agents/prompt_tokens": self.prompt_tokens,
        }
        return {name: value for name, value in counted.items() if value is not None}


def _added(total: int | None, usage: Mapping[str, Any], *names: str) -> int | None:
    """Return a total plus the first of these counts in `usage`; None if the total or the count is unknown."""
    count = next((usage[name] for name in names if isinstance(usage.get(name), int)), None)
    return None if total is None or count is None else total + count


class BadAnswerError(Exception):
    """The endpoint did not send a proper answer. The message has the reason."""


class RecordingProxy:
    """Serves the episodes of this process on loopback, as an asynchronous context manager.

    Args:
        address: address of the model.
        client: HTTP client for the address; it carries the API key.
    """

    def __init__(self, address: Address, client: aiohttp.ClientSession) -> None:
        self._address = address
        self._client = client
        self._recordings: dict[str, Recording] = {}
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_route("*", "/v1/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def episode(self) -> Iterator[Recording]:
        """Serve one episode. At the end its key becomes invalid, and its open requests are cancelled."""
        key = f"sk-areal-{secrets.token_urlsafe(24)}"
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        recording = self._recordings[key] = Recording(Endpoint(url, key, self._address.model))
        try:
            yield recording
        finally:
            del self._recordings[key]
            for task in recording.active_tasks:
                task.cancel()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        recording = self._recordings.get(bearer) or self._recordings.get(request.headers.get("x-api-key", ""))
        if recording is None:
            return _refused("this key belongs to no episode, or its episode has ended", 401)
        try:
            body = await request.json() if request.method == "POST" else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _refused("the body must be a JSON object", 400)
        if not _is_unicode(body):
            return _refused("the body has text that is not valid Unicode: an unpaired surrogate", 400)
        if request.method == "POST":
            recording.agent_ids.add(str(body.get("model") or ""))
            body["model"] = self._address.model
            if self._address.temperature is not None:
                body["temperature"] = self._address.temperature
        task, began_at = asyncio.current_task(), time.monotonic()
        assert task is not None
        recording.active_tasks.add(task)
        try:
            return await self._pass_on(request, recording, body)
        finally:
            recording.active_tasks.discard(task)
            recording.answering_s += time.monotonic() - began_at

    async def _pass_on(self, request: web.Request, recording: Recording, body: dict[str, Any]) -> web.StreamResponse:
        """Forward a request and return the answer, or an error response. The body is empty unless it is a POST."""
        headers = {name: value for name, value in request.headers.items() if name.lower() in FORWARDED_REQUEST_HEADERS}
        # Do not follow redirects: the client would send the API key to another host.
        options: dict[str, Any] = {"headers": headers, "params": request.query, "allow_redirects": False}
        url, limit = f"{self._address.url}/{request.match_info['path']}", self._address.request_timeout_s
        response, status = web.StreamResponse(), 502
        try:
            async with (
                asyncio.timeout(limit) as deadline,
                self._client.request(request.method, url, data=json.dumps(body) if body else None, **options) as answer,
            ):
                return await _forward_answer(request, response, recording, body, answer)
        except TimeoutError:
            status = 504
            fault = f"has not answered within {limit:g} s (--request-timeout)" if deadline.expired() else "timed out"
        except aiohttp.ClientError as error:
            fault = f"cannot be reached: {error or type(error).__name__}"
        except BadAnswerError as error:
            fault = str(error)
        except asyncio.CancelledError:
            recording.add_failure(body, "the agent gave up waiting for the endpoint")
            raise
        recording.add_failure(body, f"the endpoint {fault}")
        if response.prepared and request.transport is not None:
            request.transport.abort()  # a part of the answer has been sent, so the status can no longer be changed
            return response
        return _refused(f"{self._address.url} {fault}", status)


async def _forward_answer(
    request: web.Request,
    response: web.StreamResponse,
    recording: Recording,
    body: Mapping[str, Any],
    answer: aiohttp.ClientResponse,
) -> web.StreamResponse:
    """Record an answer and forward it. A stream is forwarded as it arrives; other answers are validated first."""
    headers = {name: answer.headers[name] for name in FORWARDED_ANSWER_HEADERS if name in answer.headers}
    is_stream = answer.content_type == "text/event-stream" and answer.status == 200
    if is_stream:
        response.headers.update(headers)
        await response.prepare(request)
    raw = bytearray()
    async for chunk in answer.content.iter_any():
        raw += chunk
        if len(raw) > LARGEST_BODY:
            raise BadAnswerError(f"answered with more than {LARGEST_BODY >> 20} MiB")
        if is_stream:
            await response.write(chunk)
    if body and answer.status >= 400:
        recording.add_failure(body, f"the endpoint answered {answer.status}: {shorten(raw.decode(errors='replace'))}")
    elif body:
        parsed = _paired(whole_answer(_events(raw)) if is_stream else _read(raw, answer))
        if "input_tokens" not in parsed:  # the answer of /messages/count_tokens is not the model's
            recording.add_answer(body, parsed)
    if not is_stream:
        return web.Response(body=bytes(raw), status=answer.status, headers=headers)
    await response.write_eof()
    return response


def _read(raw: bytearray, answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Parse an answer that is not a stream.

    Raises:
        BadAnswerError: it is a redirect, not JSON, or not an answer in a known protocol.
    """
    text, status = raw.decode(errors="replace"), f"answered {answer.status}"
    if answer.status >= 300:
        raise BadAnswerError(f"{status}: it redirects to {answer.headers.get('Location')}")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise BadAnswerError(f"{status}, but not with JSON: {shorten(text)}") from None
    if not isinstance(parsed, dict) or not ({"choices", "output", "content", "input_tokens"} & set(parsed)):
        raise BadAnswerError(f"{status}, but not with an answer of a model: {shorten(json.dumps(parsed))}")
    return parsed


def _paired(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Join surrogate pairs that were split between two chunks of a stream.

    Raises:
        BadAnswerError: the answer has an unpaired surrogate. No file or message can hold its text.
    """
    joined: dict[str, Any] = json.loads(json.dumps(answer))
    if not _is_unicode(joined):
        raise BadAnswerError(f"answered with text that is not valid Unicode: {shorten(json.dumps(answer))}")
    return joined


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _events(raw: bytearray) -> Iterator[dict[str, Any]]:
    for line in raw.decode(errors="replace").splitlines():
        if line.startswith("data:"):
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line[5:])
                if isinstance(event, dict):
                    yield event


def _refused(message: str, status: int) -> web.Response:
    """Return an error response that OpenAI's and Anthropic's SDKs understand."""
    error = {"message": message, "type": "endpoint_error", "code": "endpoint_error"}
    return web.json_response({"type": "error", "error": error}, status=status)
