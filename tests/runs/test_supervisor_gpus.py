"""GPUs are counted before nodes are there; nodes that have others are refused."""

import asyncio
import resource

import pytest

from areal_core.errors import RunError
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.messages import Credentials
from areal_core.runs.supervisor import Supervisor


def test_nodes_with_another_number_of_gpus_than_counted_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    launcher = LocalLauncher(LocalSettings(nodes=2))
    said = []

    async def work():
        supervisor = Supervisor(launcher, Credentials.create(1), lambda name: tmp_path / name, print, said.append)
        try:
            await supervisor.listen()
            await supervisor.bring_nodes(tmp_path)
            supervisor.require_gpus(2, [0, 3])
            supervisor.require_gpus(4, [])
            with pytest.raises(RunError, match="gpus_per_node=4, and node-0 has 2, node-1 has 2") as told:
                supervisor.require_gpus(4, [0, 2])
            assert "set it to null" in told.value.hints[0]
        finally:
            await supervisor.close()

    asyncio.run(work())


def test_connections_are_not_bounded_by_a_low_default(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def work():
        supervisor = Supervisor(
            LocalLauncher(LocalSettings()), Credentials.create(1), lambda name: tmp_path / name, print, print
        )
        await supervisor.listen()
        await supervisor.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        asyncio.run(work())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(1 << 16, before[1]) > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
