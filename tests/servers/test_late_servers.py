"""A true server that loads for longer than the trainer trains: it joins all the same, and nothing is mislabeled."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.engines import ModelReference, WeightUpdate
from areal_core.messages.servers import ServerJoins
from areal_core.servers import ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

pytestmark = [pytest.mark.servers, pytest.mark.nightly, pytest.mark.timeout(1800)]

LOADING_S = 4.0
INTERVAL_S = 1.0


def test_loading_takes_four_weight_sync_intervals(place, load, proxied, wait_until, tmp_path):
    async def check():
        first, second = (place.member(number).connection.address for number in (0, 1))
        changes = {"servers": 0, "addresses": [first]}
        settings = SGLangConfig(**{**place.settings.model_dump(exclude={"api_key"}), **changes})
        fleet = ServerFleet(SGLangAdapter(settings), tmp_path / "logs")
        async with proxied(second) as (address, proxy):
            try:
                await fleet.start(ModelReference(str(place.models[0]), "float32"))
                proxy.loading_s = LOADING_S
                async with load(fleet) as requests:
                    await fleet.answer(ServerJoins("late", address))
                    late = fleet.pool.servers["late"]
                    await wait_until(lambda: proxy.loads, "it loads")
                    for version in range(1, 30):
                        await fleet.update_weights(WeightUpdate(version, place.models[version]))
                        if late.version == version:
                            break
                        await asyncio.sleep(INTERVAL_S)
                    assert proxy.loads > 1, "the first load was overtaken"
                    assert str(late.state) == "ready", f"it did not join in {version} weight syncs"
                    proxy.loading_s = 0.0
                    await wait_until(lambda: late.requests, "it is given requests")
                    await requests.more()
                assert fleet.pop_metrics()["servers/version_skew"] == 0
            finally:
                await fleet.close()
        requests.check(place.log_files)

    place.run(check())
