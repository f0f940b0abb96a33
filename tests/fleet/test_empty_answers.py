"""A server that answers and brings nothing."""

from __future__ import annotations

from areal_core.inference.adapter import Chunk
from areal_testing.virtual_time import run_virtually


def test_a_server_that_ends_requests_without_a_token_is_left_for_another(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            plain = fleet.adapter.generate

            async def empty(connection, partial):
                if connection.address == "http://a" and not partial.name.startswith("first-"):
                    yield Chunk([], [], "abort", [])
                    return
                async for chunk in plain(connection, partial):
                    yield chunk

            fleet.adapter.generate = empty
            for number in range(6):
                found = await fleet.generate(running.request(f"r{number}"))
                assert len(found.output_ids) == 16
            assert fleet.pop_metrics()["servers/failed"] >= 1

    run_virtually(check())
