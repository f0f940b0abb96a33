"""Test the public fakes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_core.engines import ModelReference
from areal_core.servers import GenerationRequest, SamplingParameters
from areal_testing.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from areal_core.data import Generation


def test_a_client_uses_slots_and_versions_of_the_engine_that_leases_them() -> None:
    model, sampling = ModelReference("nowhere"), SamplingParameters(max_new_tokens=4)
    events: list[tuple[int, str]] = []

    def request(number: int) -> GenerationRequest:
        def note(has_slot: bool) -> None:
            events.append((number, "begins" if has_slot else "waits"))

        return GenerationRequest(str(number), [1], sampling, seed=number, on_slot_change=note)

    async def run() -> None:
        owner = FakeEngine(places=1, delay_s=0.001)
        owner.version = 3
        client = FakeEngine(delay_s=0.001).client(owner, model)

        async def ask(generate: Callable[[GenerationRequest], Awaitable[Generation]], number: int) -> Generation:
            answer = await generate(request(number))
            events.append((number, "ends"))
            return answer

        answers = await asyncio.gather(ask(client.generate, 0), ask(owner.generate, 1))
        assert [answer.versions for answer in answers] == [[3] * 4, [3] * 4]
        assert answers[0].output_ids != answers[1].output_ids
        assert events == [(0, "waits"), (0, "begins"), (1, "waits"), (0, "ends"), (1, "begins"), (1, "ends")]
        await client.close()

    asyncio.run(run())
