"""The config's sampling reaches the model behind an address."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from areal_core.config.sections import SamplingSection
from areal_core.sdk import Endpoint
from areal_core.workflows.settings import SingleTurnSettings
from areal_core.workflows.single_turn import SingleTurn
from areal_evaluation.endpoint import episode_player


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_p": 0.9, "stop": ["x"]}, {"temperature": 0.5, "top_p": 0.9, "stop": ["x"]}),
        (
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": -0.1},
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": -0.1},
        ),
        ({"min_new_tokens": 2, "stop_token_ids": [7]}, {"min_tokens": 2, "stop_token_ids": [7]}),
        ({"allow_mismatched_sampling": True, "top_p": 1.0}, {}),
    ],
)
def test_a_single_turn_is_asked_with_the_sampling_of_the_config(sampling: Any, options: Any) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async def score(_: str | None) -> Any:
        return SimpleNamespace(value=1.0)

    async def play() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = SingleTurnSettings()
        workflow = SimpleNamespace(target="core/single_turn", settings=settings, build=lambda: SingleTurn(settings))
        config: Any = SimpleNamespace(workflow=workflow, sampling=SamplingSection(max_new_tokens=9, **sampling))
        endpoint = Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key", "model")
        try:
            await episode_player(config)({"prompt": "1+1="}, endpoint, score, lambda: ())
        finally:
            await runner.cleanup()

    asyncio.run(play())
    messages = [{"role": "user", "content": "1+1="}]
    assert bodies == [{"model": "model", "messages": messages, "max_completion_tokens": 9, **options}]
