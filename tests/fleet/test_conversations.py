"""Cache keys of conversations over weight updates, as servers see them."""

from __future__ import annotations

import pytest

from areal_core.engines import WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters
from areal_testing.virtual_time import run_virtually


def turn(name, conversation, most=4):
    return GenerationRequest(name, [1, 2], SamplingParameters(max_new_tokens=most), 0, "g", conversation)


@pytest.mark.parametrize(
    ("mode", "wanted"), [("keep_cache", ["0", "0", "1", "1", "0", "1"]), ("recompute", ["0", "1", "1", "1", "1", "1"])]
)
def test_turns_before_and_after_an_update(running, mode, wanted):
    """Two episodes, one of which begins before the update, and a request without a conversation."""

    async def check():
        server = running.server()
        async with running({"a": server}, update_mode=mode) as fleet:
            server.cache_salts.clear()
            await fleet.generate(turn("1", "first"))
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            await fleet.generate(turn("2", "first"))
            await fleet.generate(turn("3", "second"))
            await fleet.generate(turn("4", "second"))
            await fleet.generate(turn("5", "first"))
            await fleet.generate(turn("6", ""))
            assert server.cache_salts == wanted

    run_virtually(check())
