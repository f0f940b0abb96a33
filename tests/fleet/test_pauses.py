"""Pauses between tries of a server, as long as they are, in virtual time."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from areal_core.inference import lifecycle
from areal_core.servers import ServerLostError
from areal_testing.virtual_time import run_virtually

PAUSES_S = lifecycle.RETRY_PAUSES_S
"""As they are without the fixture."""


def test_a_server_that_does_not_come_back_is_tried_more_and_more_rarely(running, monkeypatch):
    """A minute of pauses, of which nothing passes on the wall."""

    async def check():
        monkeypatch.setattr(lifecycle, "RETRY_PAUSES_S", PAUSES_S)
        server, tried, now = running.server(), [], asyncio.get_running_loop().time
        async with running({"a": server}) as fleet:
            identify = fleet.adapter.identify

            async def noted(connection):
                tried.append(now())
                return await identify(connection)

            fleet.adapter.identify = noted
            server.first_fault = ServerLostError("out of memory")
            fleet.pool.lose(fleet.pool.servers["a"], "for this test")
            await asyncio.sleep(60)
            assert [round(after - before) for before, after in pairwise(tried)] == [2, 4, 8, 10, 10, 10, 10]

    began = time.monotonic()
    run_virtually(check())
    assert time.monotonic() - began < 10
