"""True servers that outlive a trainer: they leave the group in which they met it, so that no communicator is left."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from areal_core.engines import ModelReference
from areal_core.inference.errors import RequestRefusedError
from areal_core.servers import ServerFleet
from areal_core.training.collectives import open_store
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig

pytestmark = [pytest.mark.servers, pytest.mark.nightly, pytest.mark.timeout(1800)]
PATIENCE = timedelta(seconds=300)


async def meet(fleet):
    """A trainer that is gone on return, without a word: the group's name."""
    store = open_store("127.0.0.1", PATIENCE)
    group = await fleet.form_group("127.0.0.1", store.port, "gloo", "")
    prefixed = store
    for prefix in group.prefixes:
        prefixed = PrefixStore(prefix, prefixed)
    await asyncio.to_thread(dist.ProcessGroupGloo, prefixed, 0, group.world_size, PATIENCE)
    await fleet.lifecycle._groups.joined()
    assert [member.group.name for member in fleet.pool.ready] == [group.name]
    return group.name


def test_the_group_of_a_former_trainer_is_destroyed(place, tmp_path):
    async def check():
        address = place.member(0).connection.address
        changes = {"servers": 0, "addresses": [address]}
        settings = SGLangConfig(**{**place.settings.model_dump(exclude={"api_key"}), **changes})
        names = []
        for _ in range(3):
            fleet = ServerFleet(SGLangAdapter(settings), tmp_path / "logs")
            await fleet.start(ModelReference(str(place.models[0]), "float32"))
            names.append(await meet(fleet))
            (member,) = fleet.pool.ready
            for former in names[:-1]:
                with pytest.raises(RequestRefusedError, match="does not exist"):
                    await member.connection.post("/destroy_weights_update_group", {"group_name": former})
            member.connection.close()
            for task in fleet.lifecycle._tasks.values():  # a controller that is killed says nothing either
                task.cancel()

    place.run(check())
