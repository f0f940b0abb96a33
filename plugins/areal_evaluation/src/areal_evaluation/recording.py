"""A proxy between agents and somebody else's model: it hides the key, bounds each wait, and notes what was said."""

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
from areal_evaluation.address import shown
from areal_evaluation.transcripts import Transcript, answers_of, whole_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_evaluation.address import Address

PASSED_UP: Final = ("content-type", "anthropic-version", "anthropic-beta")
"""Headers of a request that reach the address."""
PASSED_ON: Final = ("Content-Type", "Retry-After", "retry-after-ms", "x-should-retry", "x-request-id")
"""Headers of an answer that reach the agent."""
LARGEST_BODY: Final = 64 * 2**20
"""Bytes of a request, and of an answer."""
CUT_OFF: Final = ("length", "max_tokens", "incomplete", "max_output_tokens")
"""Reasons of protocols for which an answer ended before the model was done."""


@dataclass(slots=True)
class Recording:
    """One episode, as the model sees it.

    Attributes:
        endpoint: what the agent is given.
        transcript: what was said.
        agent_ids: the models that were asked for, all of which the address's own stands in for.
        answers, calls: of the model, and calls of tools in them.
        failed_requests: that the address did not answer as it should.
        fault: what was wrong with the last request; empty where it was answered.
        last: the last answer as text.
        is_truncated: whether that was cut off at its length.
        tokens, prompt_tokens: of answers and prompts, as the address counts them; None where it does not.
        answering_s: seconds that requests took, those side by side counted each.
        under_way: requests that are not answered yet.
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
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    def heard(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """A request was answered."""
        said = answers_of(answer)
        self.transcript.add(asked, said)
        self.fault = ""
        self.answers += 1
        self.calls += sum(len(message.get("calls", ())) for message in said)
        self.last = next((message["text"] for message in reversed(said) if message["text"]), "")
        reasons = [choice.get("finish_reason") for choice in answer.get("choices") or () if isinstance(choice, dict)]
        self.is_truncated = any(r in CUT_OFF for r in (*reasons, answer.get("stop_reason"), answer.get("status")))
        usage = answer.get("usage") or {}
        self.tokens = _added(self.tokens, usage, "completion_tokens", "output_tokens")
        self.prompt_tokens = _added(self.prompt_tokens, usage, "prompt_tokens", "input_tokens")

    def failed(self, asked: Mapping[str, Any], fault: str) -> None:
        """A request was not answered as it should be."""
        if asked:
            self.transcript.add(asked, [{"role": "endpoint", "text": fault}])
            self.failed_requests += 1
            self.fault = fault

    def metrics(self) -> dict[str, float]:
        """What is counted of the episode, whether it ended well or not."""
        counted = {
            "agents/turns": self.answers,
            "agents/calls": self.calls,
            "agents/generating_s": self.answering_s,
            "agents/failed_requests": self.failed_requests,
            "agents/prompt_tokens": self.prompt_tokens,
        }
        return {name: value for name, value in counted.items() if value is not None}


def _added(sum_: int | None, usage: Mapping[str, Any], *names: str) -> int | None:
    told = next((usage[name] for name in names if isinstance(usage.get(name), int)), None)
    return None if sum_ is None or told is None else sum_ + told


class BadAnswerError(Exception):
    """The address did not answer as it should; says how."""


class RecordingProxy:
    """Serves the episodes of this process on loopback, as an asynchronous context manager.

    Args:
        address: which model answers.
        client: asks it; carries the key.
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
        """Serve an episode; afterwards its key is worth nothing, and what it still asks for is given up."""
        key = f"sk-areal-{secrets.token_urlsafe(24)}"
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        recording = self._recordings[key] = Recording(Endpoint(url, key, self._address.model))
        try:
            yield recording
        finally:
            del self._recordings[key]
            for task in recording.under_way:
                task.cancel()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        written = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        recording = self._recordings.get(written) or self._recordings.get(request.headers.get("x-api-key", ""))
        if recording is None:
            return _refused("this key is none of an episode's, or its episode has ended", 401)
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
        task, began = asyncio.current_task(), time.monotonic()
        assert task is not None
        recording.under_way.add(task)
        try:
            return await self._pass_on(request, recording, body)
        finally:
            recording.under_way.discard(task)
            recording.answering_s += time.monotonic() - began

    async def _pass_on(self, request: web.Request, recording: Recording, body: dict[str, Any]) -> web.StreamResponse:
        """Ask the address; what it answers, or what is wrong with that. The body is empty where no answer is asked."""
        headers = {name: value for name, value in request.headers.items() if name.lower() in PASSED_UP}
        # Where somebody redirects to, the key was not meant for.
        asked: dict[str, Any] = {"headers": headers, "params": request.query, "allow_redirects": False}
        url, limit = f"{self._address.url}/{request.match_info['path']}", self._address.request_timeout_s
        response, status = web.StreamResponse(), 502
        try:
            async with (
                asyncio.timeout(limit) as deadline,
                self._client.request(request.method, url, data=json.dumps(body) if body else None, **asked) as answer,
            ):
                return await _on_message(request, response, recording, body, answer)
        except TimeoutError:
            status = 504
            fault = f"has not answered within {limit:g} s (--request-timeout)" if deadline.expired() else "timed out"
        except aiohttp.ClientError as broken:
            fault = f"cannot be asked: {broken or type(broken).__name__}"
        except BadAnswerError as bad:
            fault = str(bad)
        except asyncio.CancelledError:
            recording.failed(body, "the agent gave up waiting for the endpoint")
            raise
        recording.failed(body, f"the endpoint {fault}")
        if response.prepared and request.transport is not None:
            request.transport.abort()  # the agent has a part of the answer, and no status can be told any more
            return response
        return _refused(f"{self._address.url} {fault}", status)


async def _on_message(
    request: web.Request,
    response: web.StreamResponse,
    recording: Recording,
    body: Mapping[str, Any],
    answer: aiohttp.ClientResponse,
) -> web.StreamResponse:
    """An answer, noted. A stream is passed on as it comes; any other is looked at before the agent sees it."""
    headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
    is_stream = answer.content_type == "text/event-stream" and answer.status == 200
    if is_stream:
        response.headers.update(headers)
        await response.prepare(request)
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > LARGEST_BODY:
            raise BadAnswerError(f"answered with more than {LARGEST_BODY >> 20} MiB")
        if is_stream:
            await response.write(piece)
    if body and answer.status >= 400:
        recording.failed(body, f"the endpoint answered {answer.status}: {shown(raw.decode(errors='replace'))}")
    elif body:
        found = _paired(whole_answer(_events(raw)) if is_stream else _read(raw, answer))
        if "input_tokens" not in found:  # a count of tokens is not an answer
            recording.heard(body, found)
    if not is_stream:
        return web.Response(body=bytes(raw), status=answer.status, headers=headers)
    await response.write_eof()
    return response


def _read(raw: bytearray, answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """An answer that came whole; `BadAnswerError` where it is none."""
    text, told = raw.decode(errors="replace"), f"answered {answer.status}"
    if answer.status >= 300:
        raise BadAnswerError(f"{told}: it redirects to {answer.headers.get('Location')}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadAnswerError(f"{told} and no JSON: {shown(text)}") from None
    if not isinstance(found, dict) or not ({"choices", "output", "content", "input_tokens"} & set(found)):
        raise BadAnswerError(f"{told} and nothing that is an answer: {shown(json.dumps(found))}")
    return found


def _paired(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Join surrogates whose halves came in two pieces of a stream.

    Raises:
        BadAnswerError: the answer has an unpaired surrogate. No file or message can hold its text.
    """
    joined: dict[str, Any] = json.loads(json.dumps(answer))
    if not _is_unicode(joined):
        raise BadAnswerError(f"answered with text that is not valid Unicode: {shown(json.dumps(answer))}")
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
    """In the words of both families of protocols."""
    error = {"message": message, "type": "endpoint_error", "code": "endpoint_error"}
    return web.json_response({"type": "error", "error": error}, status=status)
