"""Whether the program of a server answers yet."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.inference.http_client import HTTPAdapter
from areal_core.inference.programs import is_healthy
from areal_core.inference.settings import FleetSettings

Adapter = type("Adapter", (HTTPAdapter,), dict.fromkeys(HTTPAdapter.__abstractmethods__))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"status": "up"}, True),
        ((200, ""), True),
        ((401, {"error": "a key is needed"}), True),
        ((403, {"error": "another key is needed"}), True),
        ((404, {"detail": "a gateway whose server loads"}), False),
        ((503, {"detail": "loading"}), False),
        ((200, "this is not JSON"), False),
    ],
)
def test_a_server_is_healthy_if_it_answers(replay, answer, expected):
    async def check():
        async with replay({"/health": answer}) as (address, _):
            return await is_healthy(Adapter(FleetSettings()), address)

    assert asyncio.run(check()) is expected


def test_a_server_that_does_not_listen_yet_is_not_healthy():
    assert not asyncio.run(is_healthy(Adapter(FleetSettings()), "http://127.0.0.1:9"))
