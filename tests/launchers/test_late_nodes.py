"""Nodes that come when the run goes on already."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from areal_core.launchers.wardens import Wardens
from areal_core.messages import ChannelClosed, Credentials, connect
from areal_core.messages.processes import NodeReady

if TYPE_CHECKING:
    from pathlib import Path


def test_a_late_node_is_left_out_where_the_folder_cannot_be_written_and_the_run_goes_on(tmp_path: Path) -> None:
    credentials, said = Credentials.create(1), list[str]()

    async def drain(channel) -> None:
        while True:
            await channel.receive()

    async def work() -> None:
        nothing = dict.fromkeys(("on_message", "on_end", "on_notice", "on_visitor"), lambda *_: None)
        wardens = Wardens(credentials, **nothing)
        wardens._say, wardens._folder = said.append, tmp_path / "gone"
        wardens._numbered.add("first", 0)
        await wardens.listen("127.0.0.1")
        channel = await connect(wardens.address, 10, "warden", credentials)
        channel.post(NodeReady("late", "late", "127.0.0.1", "lo", 1, 1, 0, str(tmp_path), 1, "python", True))
        with pytest.raises(ChannelClosed):
            await drain(channel)
        assert not wardens.nodes
        await wardens.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert said[0].startswith("the node late, which came late, is left out: the run's folder")
