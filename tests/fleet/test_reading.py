"""Weights that servers read in the memory of the trainer's GPUs: all of them read every part, or none does."""

from __future__ import annotations

import pytest

from areal_core.engines import SharedMemory, SharedTensor, TensorDescription, WeightUpdate
from areal_core.errors import RunError
from areal_core.inference.adapter import ServerAdapter
from areal_core.inference.errors import UpdateRefusedError
from areal_core.inference.server import State
from areal_testing.virtual_time import run_virtually

GPUS = (4, 5, 6, 7)
"""Of two servers with two GPUs each."""


def shared(name, *shape):
    copies = tuple(SharedMemory(gpu, f"uuid-{gpu}", f"{gpu:02x}", 4096, 0, 0, "01", 0) for gpu in GPUS)
    return SharedTensor(TensorDescription(name, "bfloat16", shape), copies)


WEIGHT, BIAS = shared("weight", 3, 4), shared("bias", 4)
TENSORS = (WEIGHT.tensor, BIAS.tensor)
REFUSED = UpdateRefusedError("there is no parameter of this name")


@pytest.fixture
def servers(running):
    return running.server(), running.server()


@pytest.fixture
def two(own, servers):
    """The fleet of two servers on the trainer's GPUs."""
    starting, _ = own(*servers, starts=2, gpus=GPUS, servers={"minimum": 2, "maximum": 2}, tensor_parallel=2)
    return starting


async def update(fleet, version, *parts):
    """Let servers read parts and take over a version; return the GPUs on which each part was to be read."""
    fleet.lifecycle._shapes = {tensor.name: tensor.shape for tensor in TENSORS}
    await fleet.sleep()
    gpus = [await fleet.read_tensors(3, part) for part in ((), *parts)]
    await fleet.update_weights(WeightUpdate(version, None, TENSORS))
    return gpus


def test_each_server_reads_on_its_own_gpus_and_is_then_labeled(running, servers, two):
    async def check():
        async with two as fleet:
            assert await update(fleet, 3, [WEIGHT], [BIAS]) == [list(GPUS)] * 3
            assert not fleet.lifecycle.is_changing
            assert set((await fleet.generate(running.request())).versions) == {3}
            return [(server.state, server.version, server.has_memory) for server in fleet.pool.servers.values()]

    assert run_virtually(check()) == [(State.READY, 3, True)] * 2
    for number, server in enumerate(servers):
        begin, *reads, end = server.readings
        assert (begin, end[0]) == (("begin",), "end")
        assert end[1].endswith("-3")
        assert [names for _, names, _ in reads] == [["weight"], ["bias"]]
        own = [[f"uuid-{gpu}"] for gpu in GPUS[2 * number : 2 * number + 2]]
        assert [[[copy.device for copy in rank] for rank in copies] for *_, copies in reads] == [own, own]


def test_no_server_is_admitted_while_others_read(two):
    """It would miss the rest."""

    async def check():
        async with two as fleet:
            await fleet.sleep()
            await fleet.read_tensors(3, ())
            assert fleet.lifecycle.is_changing

    run_virtually(check())


def test_a_server_that_does_not_read_a_part_waits_for_a_folder_and_none_reads_again(servers, two):
    async def check():
        async with two as fleet:
            servers[1].reading_faults["read"] = REFUSED
            gpus = await update(fleet, 3, [WEIGHT], [BIAS])
            states, reason = [server.state for server in fleet.pool.servers.values()], fleet.pool.explain()
            with pytest.raises(
                RunError, match="no server reads weights in GPU memory: server-1 did not read version 3: there is no"
            ):
                await fleet.read_tensors(4, ())
            return gpus, states, reason

    gpus, states, reason = run_virtually(check())
    assert gpus == [[4, 5, 6, 7], [4, 5], [4, 5]], "the trainer shares nothing where no server reads"
    assert [len(server.readings) for server in servers] == [4, 2]
    assert states == [State.READY, State.LOST]
    assert "server-1 lost: did not read version 3 in GPU memory: there is no parameter of this name" in reason


@pytest.mark.parametrize(
    ("faults", "version", "parts"),
    [({"end": REFUSED}, 3, ([WEIGHT], [BIAS])), ({}, 3, ([WEIGHT],)), ({}, 4, ([WEIGHT], [BIAS]))],
    ids=["the end is refused", "a part is missing", "another version is synced"],
)
def test_no_server_is_believed_to_have_read_what_it_has_not(servers, two, faults, version, parts):
    async def check():
        async with two as fleet:
            for server in servers:
                server.reading_faults |= faults
            with pytest.raises(RunError, match=f"no server took over the weights of version {version}"):
                await update(fleet, version, *parts)
            return [server.state for server in fleet.pool.servers.values()]

    assert run_virtually(check()) == [State.LOST] * 2, "they hold weights of several versions"


def test_servers_whose_reading_broke_off_are_lost_when_another_begins(two):
    async def check():
        async with two as fleet:
            await fleet.sleep()
            await fleet.read_tensors(3, ())
            await fleet.read_tensors(3, [WEIGHT])
            with pytest.raises(RunError, match="server-0 lost: did not read all of version 3 in GPU memory"):
                await fleet.read_tensors(4, ())
            return [server.state for server in fleet.pool.servers.values()]

    assert run_virtually(check()) == [State.LOST] * 2


@pytest.mark.parametrize("call", ["begin", "read"])
def test_if_no_server_reads_the_trainer_learns_why(servers, two, call):
    async def check():
        async with two as fleet:
            for server in servers:
                server.reading_faults[call] = REFUSED
            await update(fleet, 3, [WEIGHT])

    with pytest.raises(RunError, match=r"no server reads weights in GPU memory: server-\d did not .*: there is no"):
        run_virtually(check())


def test_beside_a_server_whose_gpus_are_not_known_none_reads(servers, two):
    async def check():
        async with two as fleet:
            fleet.pool.servers["server-1"].gpus = ()
            await update(fleet, 3, [WEIGHT])

    with pytest.raises(RunError, match="the run does not know the GPUs of server-1"):
        run_virtually(check())
    assert [server.readings for server in servers] == [[], []]


def test_an_adapter_that_cannot_read_is_not_believed(two, monkeypatch):
    async def check():
        async with two as fleet:
            monkeypatch.setattr(type(fleet.adapter), "read", ServerAdapter.read)
            await update(fleet, 3, [WEIGHT])

    with pytest.raises(RunError, match="Fake servers read no weights in GPU memory"):
        run_virtually(check())
