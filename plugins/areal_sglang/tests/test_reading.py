"""Weights that SGLang reads in the trainer's memory: what it is sent, as its own unpickler reads it."""

from __future__ import annotations

import io
import pickle
from base64 import b64decode
from inspect import signature

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.config import resolve
from areal_core.engines import SharedMemory, TensorDescription
from areal_core.errors import ConfigError
from areal_core.servers import UpdateRefusedError
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_sglang.reading import pickled

WEIGHT, BIAS = TensorDescription("weight", "bfloat16", (3, 4)), TensorDescription("bias", "bfloat16", (4,))


def memory(gpu):
    return SharedMemory(gpu, f"uuid-{gpu}", "0aff", 4096, 512, 16, "0102", 3)


class Recorder(pickle.Unpickler):
    """Keeps with which arguments PyTorch would have opened memory."""

    def find_class(self, module, name):
        found = super().find_class(module, name)
        return (lambda *values: values) if found is rebuild_cuda_tensor else found


def test_a_tensor_is_opened_where_it_lies():
    ((name, values),) = Recorder(io.BytesIO(pickled([WEIGHT], [memory(7)]))).load()
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


DONE = {"success": True, "message": ""}
REFUSED = (400, {"success": False, "message": "there is no parameter of this name"})
MARKS = ("begin_weight_update", "end_weight_update")
ROUTES = (*MARKS, "update_weights_from_tensor", "update_weight_version")


def answers(**changed):
    return {f"/{name}": changed.get(name, DONE) for name in ROUTES}


async def read(connection):
    """Two tensors, on the two GPUs of a server."""
    adapter = SGLangAdapter(SGLangConfig(memory_saver=True, tensor_parallel=2))
    await adapter.begin_reading(connection)
    await adapter.read(connection, [WEIGHT, BIAS], [[memory(gpu), memory(gpu)] for gpu in (4, 5)])
    await adapter.end_reading(connection, "mark-3")


def test_each_rank_is_sent_where_the_tensors_lie_on_its_gpu(adapter_call):
    _, posted = adapter_call(answers(), read)
    (sent,) = [body["serialized_named_tensors"] for body in posted if "serialized_named_tensors" in body]
    opened = [Recorder(io.BytesIO(b64decode(part))).load() for part in sent]
    assert [[name for name, _ in part] for part in opened] == [["weight", "bias"]] * 2
    assert [[values[6] for _, values in part] for part in opened] == [["uuid-4"] * 2, ["uuid-5"] * 2]
    assert posted[-1] == {"new_version": "mark-3", "abort_all_requests": False}


def test_older_versions_know_no_beginning_and_no_end(adapter_call):
    older = {path: answer for path, answer in answers().items() if path.strip("/") not in MARKS}
    _, posted = adapter_call(older, read)
    assert posted[-1]["new_version"] == "mark-3"


@pytest.mark.parametrize("route", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"])
def test_what_the_server_refuses_is_an_error(adapter_call, route):
    with pytest.raises(UpdateRefusedError, match="there is no parameter of this name"):
        adapter_call(answers(**{route: REFUSED}), read)


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
