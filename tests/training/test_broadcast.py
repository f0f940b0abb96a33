"""The main rank: where its store listens, and how it waits for replies of the controller."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from areal_core.errors import RunError
from areal_core.messages.rollouts import Evaluated, SkipSync
from areal_core.runtime.rpc import Failed, LoopThread, Peer, private_folder, serve
from areal_core.training.collectives import open_store
from areal_core.training.rollout_client import RolloutClient
from areal_core.training.source import Interrupted
from tests.needs_ipv6 import NEEDS_IPV6

HANG = timedelta(seconds=60)


def listening() -> set[str]:
    """Return the addresses on which this process listens, as the kernel writes them."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    files = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for file in files for line in file]
    return {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


@pytest.mark.parametrize(
    ("host", "digits"), [("127.0.0.1", "0100007F"), pytest.param("::1", f"{0:024}01000000", marks=NEEDS_IPV6)]
)
def test_the_store_listens_on_one_address_alone(host, digits):
    before = listening()
    store = open_store(host, HANG)
    store.set("key", "value")
    assert TCPStore(host, store.port, is_master=False, timeout=HANG).get("key") == b"value"
    assert listening() - before <= {digits}


def test_an_address_of_another_machine_is_said_to_be_none_of_this_one():
    with pytest.raises(RunError, match=r"cannot listen on 203\.0\.113\.1 for the processes that shall meet there"):
        open_store("203.0.113.1", HANG)


def test_that_the_others_have_given_up_is_known_without_waiting():
    """The main rank checks while it sends tensors, in its only thread."""

    async def refuse(peer: Peer) -> None:
        _, number = await peer.receive_request()
        peer.reply(number, Failed("no server took over the weights"))
        await peer.receive()

    thread = LoopThread("server")
    with private_folder() as folder:
        server = thread.call(serve(f"unix:{folder / 'socket'}", refuse))
        client = RolloutClient(server.address)
        reply = client.request(SkipSync(1))
        deadline = time.monotonic() + HANG.total_seconds()
        while not client.has_failed(reply):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(RunError, match="no server took over"):
            client.wait(reply)


def test_an_evaluation_has_its_time_to_end_once_the_run_was_asked_to_stop():
    """The log names what is awaited."""

    async def evaluates_late(peer: Peer) -> None:
        _, number = await peer.receive_request()
        await asyncio.sleep(1.0)
        peer.reply(number, Evaluated({"reward": 0.5}))
        await peer.receive()  # `NextBatch`, never answered
        await peer.receive()

    thread, lines = LoopThread("server"), list[str]()
    with private_folder() as folder:
        server = thread.call(serve(f"unix:{folder / 'socket'}", evaluates_late))
        client = RolloutClient(server.address, is_interrupted=lambda: True, log=lines.append)
        client.begin_evaluation()
        assert client.end_evaluation(HANG.total_seconds()) == {"reward": 0.5}
        with pytest.raises(Interrupted):
            client.next_batch(1)
    assert lines == ["asked to stop: the evaluation has 60 s to end"]
