"""Requests that are issued all the time, true servers that are started again, and a proxy that spoils answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_core.disk import read_lines
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance.models import FIRST_FORCED, make_constant_model

TOKENS = 240
MAX_CONCURRENCY = 12
PROMPTS = ([5, 17, 33, 8], [5, 17, 33, 8, 40, 41, 42, 43, 44], [60], [12, 7] * 11)


HANG_S = 900
"""A wait that is longer has no end; everything here takes seconds."""
CLIENT_ID = 8
"""Characters that a client writes before the name of a request."""


async def until(condition, what):
    """Wait until something is so; a test fails, and does not hang, where it never is."""
    try:
        async with asyncio.timeout(HANG_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited {HANG_S} s in vain for: {what}") from None


class Load:
    """A dozen requests at a time, continuously, and everything that is to be true of them at the end.

    The models give a token that says which version sampled it, so a wrong label shows.
    """

    numbers = itertools.count()

    def __init__(self, fleet):
        self.fleet = fleet
        self.answers = defaultdict(list)
        self.errors = {}
        self._is_over = False
        self._workers = []

    async def __aenter__(self):
        self._workers = [asyncio.create_task(self._work(place)) for place in range(MAX_CONCURRENCY)]
        return self

    async def __aexit__(self, kind, *_):
        self._is_over = True
        if kind is not None:
            for worker in self._workers:
                worker.cancel()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self._workers, return_exceptions=kind is not None)

    async def _work(self, place):
        while not self._is_over:
            name = f"load-{next(self.numbers)}"
            prompt = PROMPTS[place % len(PROMPTS)]
            request = GenerationRequest(name, prompt, SamplingParameters(max_new_tokens=TOKENS), place, str(place % 5))
            self.answers[name] = []
            try:
                self.answers[name].append(await self.fleet.generate(request))
            except ValueError as error:
                self.errors[name] = error

    @property
    def answered(self):
        return sum(map(len, self.answers.values()))

    async def more(self, count=MAX_CONCURRENCY):
        """Wait until so many further requests are answered."""
        goal = self.answered + count
        await until(lambda: self.answered >= goal or self.errors, f"{count} further answers")

    def check(self, logs=()):
        """Every request is answered once and in full, every label is right, and the servers' logs agree."""
        assert self.errors == {}
        wrong = []
        for name, found in self.answers.items():
            assert len(found) == 1, f"{name} was answered {len(found)} times"
            tokens, versions = found[0].output_ids, found[0].versions
            assert len(tokens) == len(found[0].logprobs) == TOKENS, f"{name} got {len(tokens)} tokens"
            assert versions == sorted(versions), f"the versions of {name} run backwards"
            wrong += [
                (name, place, token - FIRST_FORCED, version)
                for place, (token, version) in enumerate(zip(tokens, versions, strict=True))
                if token != FIRST_FORCED + version
            ]
        assert wrong == [], f"(request, place, version that sampled, label): {wrong[:3]} and more"
        if logs:
            check_logs(self.answers, logs)


def request_events(logs):
    """What SGLang servers wrote about requests, of the lines that are whole."""
    lines = [line for log in logs for line in log.read_text().splitlines() if '"event": "request.' in line]
    return [json.loads(line[line.index("{") :]) for line in lines if line.endswith("}")]


def check_logs(names, logs):
    """Over all servers each partial generation ended once at most, and the last of each request in full, once."""
    events = request_events(logs)
    asked, ended = defaultdict(set), Counter()
    last_words = {}
    for event in events:
        name, _, number = str(event.get("rid"))[CLIENT_ID:].partition(".")
        if name not in names:
            continue
        if event["event"] == "request.received":
            assert int(number) not in asked[name], f"{name}.{number} was asked for twice"
            asked[name].add(int(number))
        else:
            ended[name, int(number)] += 1
            last_words[name, int(number)] = event["out"]["meta_info"]["finish_reason"]["type"]
    assert [partial for partial, count in ended.items() if count > 1] == []
    assert asked.keys() == set(names)
    for name, numbers in asked.items():
        last = max(numbers)
        assert ended[name, last] == 1, f"the last partial generation of {name}, {last}, did not end"
        assert last_words[name, last] == "length"


class Proxy:
    """Stands in front of a server. What it does to requests, and to nothing else, is in `mode`.

    Attributes:
        mode: garbage, other form, error, cut, slow, refuse; empty for nothing.
        spoils_first: whether the first request, by which the fleet tries a server, is spoilt as well.
        info: changes to what the server says of itself.
        loading_s: seconds that loading weights takes longer.
        loads: how often weights were to be loaded.
        spoilt: names of the partial generations that were spoilt.
    """

    def __init__(self, backend):
        self.backend = backend
        self.mode = ""
        self.spoils_first = False
        self.info: dict[str, Any] = {}
        self.loading_s = 0.0
        self.loads = 0
        self.spoilt: list[str] = []

    async def answer(self, request):
        body = await request.read()
        name = str(json.loads(body).get("rid")) if request.path == "/generate" else ""
        mode = self.mode if name and (self.spoils_first or not name.startswith("first-")) else ""
        if mode:
            self.spoilt.append(name)
        if request.path == "/update_weights_from_disk":
            self.loads += 1
            await asyncio.sleep(self.loading_s)
        match mode:
            case "error":
                return web.json_response({"error": {"message": "it burns"}}, status=500)
            case "refuse":
                return web.json_response({"error": {"message": "no such thing"}}, status=400)
            case "garbage":
                return web.Response(text="data: <html>this is not JSON</html>\n\n", content_type="text/event-stream")
            case "other form":
                return web.Response(text='data: {"tokens": [1, 2]}\n\n', content_type="text/event-stream")
            case "slow":
                await asyncio.sleep(30)
        return await self._passed_on(request, body, cut_after=2 if mode == "cut" else None)

    async def _passed_on(self, request, body, cut_after):
        url = self.backend + request.path_qs
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(read_bufsize=1 << 22) as session,
            session.request(request.method, url, data=body, headers=headers, timeout=None) as found,
        ):
            if self.info and request.path == "/server_info":
                return web.json_response({**await found.json(), **self.info})
            response = web.StreamResponse(status=found.status, headers={"Content-Type": found.content_type})
            await response.prepare(request)
            count = 0
            async for line in found.content:
                await response.write(line)
                count += line.startswith(b"data:")
                if cut_after is not None and count >= cut_after:
                    request.transport.abort()
                    break
            return response


@pytest.fixture(scope="session")
def load():
    return Load


@pytest.fixture(scope="session")
def wait_until():
    return until


@pytest.fixture(scope="session")
def proxied():
    """`async with proxied(address) as (address, proxy)`."""

    @asynccontextmanager
    async def run(backend):
        proxy = Proxy(backend)
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{rest:.*}", proxy.answer)
        async with TestServer(application) as server:
            yield str(server.make_url("")).rstrip("/"), proxy

    return run


VERSIONS = 45


class Place:
    """Two servers that a fleet started, with the event loop in which everything happens."""

    def __init__(self, folder, settings):
        self.folder = folder
        self.settings = settings
        self.models = [make_constant_model(folder / f"model{version}", version) for version in range(VERSIONS)]
        self.loop = asyncio.new_event_loop()
        self.logs = folder / "logs"
        self.model = ModelReference(str(self.models[0]), "float32")
        self.fleet = ServerFleet(SGLangAdapter(settings), self.logs)
        self.version = 0

    def run(self, work):
        async def limited():
            async with asyncio.timeout(2 * HANG_S):
                return await work

        return self.loop.run_until_complete(limited())

    @property
    def log_files(self):
        return sorted(self.logs.glob("server-*.log"))

    def member(self, number):
        return self.fleet.pool.servers[f"server-{number}"]

    def signal(self, number, kind):
        """To the server's process and everything that it started."""
        os.killpg(self.fleet._local.processes[f"server-{number}"].pid, kind)

    def events(self):
        """What the servers wrote about requests."""
        return request_events(self.log_files)

    def next_update(self):
        self.version += 1
        return WeightUpdate(self.version, self.models[self.version])

    def transitions(self, name):
        return [entry for entry in read_lines(self.logs / "servers.jsonl") if entry["server"] == name]


@pytest.fixture(scope="module")
def settings(sglang_program, sglang_options, server_environment):
    logging = {"log_requests": True, "log_requests_level": 0, "log_requests_format": "json"}
    return SGLangConfig(
        program=sglang_program,
        options={**sglang_options, **logging},
        environment=server_environment,
        servers={"minimum": 2, "maximum": 2},
        stream_interval=8,
        health_interval_s=0.5,
        health_timeout_s=10.0,
        update_timeout_s=180.0,
        start_timeout_s=900.0,
        restarts=9,
    )


@pytest.fixture(scope="module")
def place(settings, tmp_path_factory):
    found = Place(tmp_path_factory.mktemp("faults"), settings)
    try:
        found.run(found.fleet.start(found.model))
        yield found
    finally:
        found.run(found.fleet.close())
        found.loop.close()
