"""Weights that SGLang reads in the trainer's memory: what it is sent, as its own unpickler reads it, and to whom."""

from __future__ import annotations

import asyncio
import io
import pickle
from base64 import b64decode
from inspect import signature

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.config import resolve
from areal_core.engines import SharedMemory, SharedTensor, TensorDescription, WeightUpdate
from areal_core.errors import ConfigError, RunError
from areal_core.inference.server import State
from areal_core.servers import InferenceServer, ServerConnection, ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_sglang.reading import Reading, pickled

WEIGHT = TensorDescription("weight", "bfloat16", (3, 4))
DONE = {"success": True, "message": ""}


def memory(gpu):
    return SharedMemory(gpu, f"uuid-{gpu}", "0aff", 4096, 512, 16, "0102", 3)


def tensors(*gpus):
    return [SharedTensor(WEIGHT, tuple(memory(gpu) for gpu in gpus))]


class Recorder(pickle.Unpickler):
    """Keeps with which arguments PyTorch would have opened memory."""

    def find_class(self, module, name):
        found = super().find_class(module, name)
        return (lambda *values: values) if found is rebuild_cuda_tensor else found


def test_a_tensor_is_opened_where_it_lies():
    ((name, values),) = Recorder(io.BytesIO(pickled(tensors(4, 7), 7))).load()
    assert name == "weight"
    assert signature(rebuild_cuda_tensor).bind(*values).arguments == {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([3, 4]),
        "tensor_stride": (4, 1),
        "tensor_offset": 16,
        "storage_cls": torch.UntypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": "uuid-7",
        "storage_handle": b"\x0a\xff",
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"\x01\x02",
        "ref_counter_offset": 3,
        "event_handle": b"",
        "event_sync_required": False,
    }


class Fleet:
    """Two servers on two GPUs each that gave their memory away; each answers as it is told to."""

    def __init__(self, replay, tmp_path, *answers):
        self._served = [replay(answer) for answer in answers]
        settings = SGLangConfig(memory_saver=True, servers=2, tensor_parallel=2, update_timeout_s=60)
        self.adapter = SGLangAdapter(settings)
        fleet = ServerFleet(settings, self.adapter, tmp_path)
        self.pool, self.lifecycle = fleet.pool, fleet.lifecycle
        self.lifecycle._shapes = {"weight": (3, 4), "bias": (4,)}
        self.reading = Reading(self.adapter, fleet)
        self.bodies = []

    async def __aenter__(self):
        for number, served in enumerate(self._served):
            address, bodies = await served.__aenter__()
            server = InferenceServer(f"server-{number}", self.adapter, ServerConnection(address), "recompute", "mark-")
            server.gpus = 4 + 2 * number, 5 + 2 * number
            server.state, server.has_memory = State.UPDATING, False
            self.pool.servers[server.name] = server
            self.bodies.append(bodies)
        return self

    async def __aexit__(self, *_):
        for server in self.pool.servers.values():
            server.connection.close()
        for served in self._served:
            await served.__aexit__(None, None, None)

    async def update(self, version, *parts):
        """Have parts read and the version synced; on which GPUs each was read."""
        found = [await self.reading.read(version, part) for part in ((), *parts)]
        told = tuple(one.tensor for one in (*tensors(4, 5, 6, 7), BIAS))
        await self.reading.update_weights(WeightUpdate(version, None, told))
        return found


def fine(**changed):
    asked = ("resume_memory_occupation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update")
    answers = {f"/{name}": DONE for name in (*asked, "update_weight_version", "continue_generation", "abort_request")}
    return {**answers, **{f"/{name}": answer for name, answer in changed.items()}}


BIAS = SharedTensor(TensorDescription("bias", "bfloat16", (4,)), tuple(memory(gpu) for gpu in (4, 5, 6, 7)))


def test_each_server_reads_on_its_own_gpus_and_is_then_labeled(replay, tmp_path):
    async def run():
        async with Fleet(replay, tmp_path, fine(), fine()) as fleet:
            assert await fleet.update(3, tensors(4, 5, 6, 7), [BIAS]) == [[4, 5, 6, 7]] * 3
            servers = list(fleet.pool.servers.values())
            assert not fleet.lifecycle.is_changing
            return fleet.bodies, [(server.state, server.version, server.has_memory) for server in servers]

    bodies, servers = asyncio.run(run())
    assert servers == [(State.READY, 3, True)] * 2
    for number, posted in enumerate(bodies):
        sent = [body["serialized_named_tensors"] for body in posted if "serialized_named_tensors" in body]
        opened = [[Recorder(io.BytesIO(b64decode(each))).load() for each in part] for part in sent]
        devices = [[values[6] for ((_, values),) in part] for part in opened]
        assert devices == [[f"uuid-{4 + 2 * number}", f"uuid-{5 + 2 * number}"]] * 2
        assert [name for ((name, _),) in (part[0] for part in opened)] == ["weight", "bias"]
        assert {"new_version": "mark-3", "abort_all_requests": False} in posted


def test_no_server_is_admitted_while_others_read(replay, tmp_path):
    """It would miss the rest."""

    async def run():
        async with Fleet(replay, tmp_path, fine(), fine()) as fleet:
            await fleet.reading.read(3, ())
            return fleet.lifecycle.is_changing

    assert asyncio.run(run())


REFUSED = (400, {"success": False, "message": "there is no parameter of this name"})


def test_who_does_not_read_every_part_waits_for_a_folder_and_nobody_reads_again(replay, tmp_path):
    async def run():
        async with Fleet(replay, tmp_path, fine(), fine(update_weights_from_tensor=REFUSED)) as fleet:
            gpus = await fleet.update(3, tensors(4, 5, 6, 7), [BIAS])
            states = [server.state for server in fleet.pool.servers.values()]
            parts = [sum("serialized_named_tensors" in body for body in posted) for posted in fleet.bodies]
            with pytest.raises(
                RunError, match="no server reads weights in GPU memory: server-1 did not read version 3"
            ):
                await fleet.reading.read(4, ())
            return gpus, parts, states, fleet.pool.explain()

    gpus, parts, states, reason = asyncio.run(run())
    assert gpus == [[4, 5, 6, 7], [4, 5], [4, 5]], "the trainer shares nothing where nobody reads"
    assert parts == [2, 1]
    assert states == [State.READY, State.LOST]
    assert "server-1 lost: did not read version 3 in GPU memory" in reason
    assert "there is no parameter of this name" in reason


@pytest.mark.parametrize(
    ("changed", "version", "parts"),
    [
        ({"end_weight_update": REFUSED}, 3, 2),
        ({}, 3, 1),
        ({}, 4, 2),
    ],
    ids=["the end is refused", "a part is missing", "another version is synced"],
)
def test_nobody_is_believed_to_have_read_what_it_has_not(replay, tmp_path, changed, version, parts):
    async def run():
        async with Fleet(replay, tmp_path, fine(**changed), fine(**changed)) as fleet:
            read = [tensors(4, 5, 6, 7), [BIAS]][:parts]
            for part in ((), *read):
                await fleet.reading.read(3, part)
            told = tuple(one.tensor for one in (*tensors(4), BIAS))
            await fleet.reading.update_weights(WeightUpdate(version, None, told))

    with pytest.raises(RunError, match=f"no server took over the weights of version {version}"):
        asyncio.run(run())


def test_older_versions_know_no_beginning_and_no_end(replay, tmp_path):
    async def run():
        older = {path: answer for path, answer in fine().items() if "_weight_update" not in path}
        async with Fleet(replay, tmp_path, older, older) as fleet:
            await fleet.update(3, tensors(4, 5, 6, 7), [BIAS])
            return [server.version for server in fleet.pool.servers.values()]

    assert asyncio.run(run()) == [3, 3]


def test_where_nobody_reads_the_trainer_is_told(replay, tmp_path):
    refusing = fine(resume_memory_occupation=(500, {"message": "out of memory"}))

    async def run():
        async with Fleet(replay, tmp_path, refusing, refusing) as fleet:
            await fleet.reading.read(3, ())

    with pytest.raises(
        RunError, match=r"no server reads weights in GPU memory: server-\d did not (.|\n)*out of memory"
    ):
        asyncio.run(run())


def test_beside_a_server_that_somebody_else_started_nobody_reads(replay, tmp_path):
    async def run():
        async with Fleet(replay, tmp_path, fine(), fine()) as fleet:
            fleet.pool.servers["server-1"].gpus = ()
            with pytest.raises(RunError, match="of server-1 the run does not know the GPUs"):
                await fleet.reading.read(3, ())
            return fleet.bodies

    assert asyncio.run(run()) == [[], []]


TURNS = ["placement.generation=[0,1]", "placement.training=[0,1]"]
TURNS += ["inference_engine.memory_saver=true", "inference_engine.options={max_total_tokens: 4096}"]


def resolved(*words):
    return resolve(None, ["grpo"], ["inference_engine=sglang", "inference_engine.servers=2", *TURNS, *words])


def test_colocated_it_is_the_default_where_servers_can_read():
    assert resolved().config.weight_sync.transport.target == "core/ipc"
    assert resolved("weight_sync.transport=memory").config.weight_sync.transport.target == "core/memory"
    assert (
        resolved("inference_engine.servers=1", "inference_engine.data_parallel=2").config.weight_sync.transport.target
        == "core/memory"
    )
    assert resolved("launcher.trainer_processes=1").config.weight_sync.transport.target == "core/memory", (
        "a GPU without a rank"
    )
    assert (
        resolved("placement.generation=[0,0,1,1]", "inference_engine.servers=4").config.weight_sync.transport.target
        == "core/memory"
    ), "a copy that is offered is read once"
    others = ["placement.training=[2,3]"]
    assert resolved(*others).config.weight_sync.transport.target == "core/broadcast"


@pytest.mark.parametrize(
    "words",
    [
        ["placement.training=[2,3]"],
        ["placement.generation=[0,0,1,1]", "inference_engine.servers=4"],
        ["inference_engine.data_parallel=2", "inference_engine.servers=1"],
    ],
)
def test_where_they_cannot_the_config_is_refused(words):
    with pytest.raises(ConfigError) as caught:
        resolved("weight_sync.transport=ipc", *words)
    assert "weight_sync.transport is ipc, which is for servers of the run that take turns" in str(caught.value)
