"""A proxy between agents and somebody else's model: it hides the key, bounds each wait, and notes what was said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from areal_core.interfaces import Endpoint
from areal_evaluation.address import shown
from areal_evaluation.transcripts import Transcript, answers_of, whole_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_evaluation.address import Address

PASSED_UP: Final = ("content-type", "anthropic-version", "anthropic-beta")
"""Headers of a request that reach the address."""
LARGEST_BODY: Final = 64 * 2**20
LARGEST_ANSWER: Final = 64 * 2**20
PASSED_ON: Final = ("Content-Type", "Retry-After", "retry-after-ms", "x-should-retry", "x-request-id")
"""Headers of an answer that reach the agent."""
CUT_OFF: Final = ("length", "max_tokens", "incomplete", "max_output_tokens")
"""Reasons of protocols for which an answer ended before the model was done."""


class Recording:
    """One episode, as the model sees it.

    Attributes:
        endpoint: what the agent is given.
        transcript: what was said.
        answers, calls: of the model, and calls of tools in them.
        failed_requests: that the address did not answer as it should.
        fault: what was wrong with the last request; empty where it was answered.
        tokens: of the model's answers and of its prompts, as the address counts them; None where it does not.
        players: the models that were asked for, all of which the address's own stands in for.
        last: the last answer as text.
        is_truncated: whether that was cut off at its length.
        answering_s: seconds that requests took, those side by side counted each.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.transcript = Transcript()
        self.players: set[str] = set()
        self.answers = self.calls = self.failed_requests = 0
        self.fault = self.last = ""
        self.tokens: int | None = 0
        self.prompt_tokens: int | None = 0
        self.is_truncated = False
        self.answering_s = 0.0
        self.under_way: set[asyncio.Task[Any]] = set()

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
        self.transcript.add(asked, [{"role": "endpoint", "text": fault}])
        self.failed_requests += 1
        self.fault = fault

    def facts(self) -> dict[str, Any]:
        """What is noted of the episode, whether it ended well or not."""
        counted: dict[str, float] = {
            "agents/turns": self.answers,
            "agents/calls": self.calls,
            "agents/generating_s": self.answering_s,
        }
        counted["agents/failed_requests"] = self.failed_requests
        if self.prompt_tokens is not None:
            counted["agents/prompt_tokens"] = self.prompt_tokens
        return {"metrics": counted, "conversations": self.transcript.conversations}


def _added(sum_: int | None, usage: Mapping[str, Any], *names: str) -> int | None:
    told = next((usage[name] for name in names if isinstance(usage.get(name), int)), None)
    return None if sum_ is None or told is None else sum_ + told


class BadAnswerError(Exception):
    """The address did not answer as it should; says how."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class RecordingProxy:
    """Serves the episodes of this process.

    Args:
        address: which model answers.
        client: asks it; carries the key.
    """

    def __init__(self, address: Address, client: aiohttp.ClientSession) -> None:
        self._address = address
        self._client = client
        self._recordings: dict[str, Recording] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen on loopback."""
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_route("*", "/v1/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Listen no more; safe to call twice."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self) -> Recording:
        """Serve an episode from now on."""
        key = f"sk-areal-{secrets.token_urlsafe(24)}"
        self._recordings[key] = Recording(Endpoint(self._url, key, self._address.model))
        return self._recordings[key]

    def end(self, recording: Recording) -> None:
        """Its key is worth nothing any more, and what it still asks for is given up."""
        del self._recordings[recording.endpoint.api_key]
        for task in recording.under_way:
            task.cancel()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        written = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        recording = self._recordings.get(written) or self._recordings.get(request.headers.get("x-api-key", ""))
        if recording is None:
            return _refused("this key is none of an episode's, or its episode has ended", 401)
        task = asyncio.current_task()
        assert task is not None
        recording.under_way.add(task)
        began = time.monotonic()
        try:
            return await self._pass_on(request, recording)
        finally:
            recording.under_way.discard(task)
            recording.answering_s += time.monotonic() - began

    async def _pass_on(self, request: web.Request, recording: Recording) -> web.StreamResponse:
        body = await self._body(request, recording)
        if body is None:
            return _refused("the body must be a JSON object", 400)
        headers = {name: value for name, value in request.headers.items() if name.lower() in PASSED_UP}
        data = json.dumps(body) if body else None
        begun: list[web.StreamResponse] = []
        # Where somebody redirects to, the key was not meant for.
        asked: dict[str, Any] = {"data": data, "headers": headers, "params": request.query, "allow_redirects": False}
        url, limit = f"{self._address.url}/{request.match_info['path']}", self._address.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit) as deadline,
                self._client.request(request.method, url, **asked) as answer,
            ):
                if "text/event-stream" in answer.headers.get("Content-Type", "") and answer.status == 200:
                    return await _pass_on_pieces(request, begun, recording, body, answer)
                return await _pass_on_whole(recording, body, answer)
        except TimeoutError:
            fault = f"has not answered within {limit:g} s (--request-timeout)" if deadline.expired() else "timed out"
            error = BadAnswerError(fault, 504)
        except aiohttp.ClientError as broken:
            error = BadAnswerError(f"cannot be asked: {broken or type(broken).__name__}")
        except BadAnswerError as bad:
            error = bad
        except asyncio.CancelledError:
            if body:
                recording.failed(body, "the agent gave up waiting for the endpoint")
            raise
        if body:
            recording.failed(body, f"the endpoint {error}")
        if begun and request.transport is not None:
            request.transport.abort()  # the agent has a part of the answer, and no status can be told any more
            return begun[0]
        return _refused(f"{self._address.url} {error}", error.status)

    async def _body(self, request: web.Request, recording: Recording) -> dict[str, Any] | None:
        """The body of a request for an answer, with this model and this temperature; empty where there is none."""
        if request.method != "POST":
            return {}
        try:
            body = await request.json()
        except ValueError:
            return None
        if not isinstance(body, dict):
            return None
        recording.players.add(str(body.get("model") or ""))
        body["model"] = self._address.model
        if self._address.temperature is not None:
            body["temperature"] = self._address.temperature
        return body


async def _pass_on_whole(
    recording: Recording, body: Mapping[str, Any], answer: aiohttp.ClientResponse
) -> web.StreamResponse:
    """An answer is looked at before the agent sees it: one that is none is told as what it is."""
    raw = await _bounded(answer)
    headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
    if body and answer.status >= 400:
        recording.failed(body, f"the endpoint answered {answer.status}: {shown(raw.decode(errors='replace'))}")
    elif body:
        if answer.status >= 300:
            raise BadAnswerError(f"answered {answer.status}: it redirects to {answer.headers.get('Location')}")
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            raise BadAnswerError(
                f"answered {answer.status} and no JSON: {shown(raw.decode(errors='replace'))}"
            ) from None
        if not isinstance(found, dict) or not ({"choices", "output", "content", "input_tokens"} & set(found)):
            raise BadAnswerError(f"answered {answer.status} and nothing that is an answer: {shown(json.dumps(found))}")
        if "input_tokens" not in found:  # a count of tokens is no answer
            recording.heard(body, found)
    return web.Response(body=raw, status=answer.status, headers=headers)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > LARGEST_ANSWER:
            raise BadAnswerError(f"answered with more than {LARGEST_ANSWER >> 20} MiB")
    return bytes(raw)


async def _pass_on_pieces(
    request: web.Request,
    begun: list[web.StreamResponse],
    recording: Recording,
    body: Mapping[str, Any],
    answer: aiohttp.ClientResponse,
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    begun.append(response)
    await response.prepare(request)
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > LARGEST_ANSWER:
            raise BadAnswerError(f"answered with more than {LARGEST_ANSWER >> 20} MiB")
        await response.write(piece)
    recording.heard(body, whole_answer(_events(bytes(raw))))
    await response.write_eof()
    return response


def _events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for line in raw.decode(errors="replace").splitlines():
        if line.startswith("data:"):
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line[5:]))
    return [event for event in found if isinstance(event, dict)]


def _refused(message: str, status: int) -> web.Response:
    """In the words of both families of protocols."""
    error = {"message": message, "type": "endpoint_error", "code": "endpoint_error"}
    return web.json_response({"type": "error", "error": error}, status=status)
