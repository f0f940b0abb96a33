"""Test CUDA IPC weight sync with SGLang: the requests, as SGLang's own unpickler reads them."""

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
    """Returns the arguments with which PyTorch would open memory, instead of opening it."""

    def find_class(self, module, name):
        function = super().find_class(module, name)
        return (lambda *values: values) if function is rebuild_cuda_tensor else function


def test_a_pickle_contains_the_location_of_a_tensor():
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
    """Sync two tensors to a server on two GPUs."""
    adapter = SGLangAdapter(SGLangConfig(memory_saver=True, tensor_parallel=2))
    await adapter.begin_reading(connection)
    await adapter.read(connection, [WEIGHT, BIAS], [[memory(gpu), memory(gpu)] for gpu in (4, 5)])
    await adapter.end_reading(connection, "mark-3")


def test_each_rank_gets_the_locations_on_its_gpu(adapter_call):
    _, posted = adapter_call(answers(), read)
    (sent,) = [body["serialized_named_tensors"] for body in posted if "serialized_named_tensors" in body]
    opened = [Recorder(io.BytesIO(b64decode(part))).load() for part in sent]
    assert [[name for name, _ in part] for part in opened] == [["weight", "bias"]] * 2
    assert [[values[6] for _, values in part] for part in opened] == [["uuid-4"] * 2, ["uuid-5"] * 2]
    assert posted[-1] == {"new_version": "mark-3", "abort_all_requests": False}


def test_older_versions_without_begin_and_end_are_updated(adapter_call):
    older = {path: answer for path, answer in answers().items() if path.strip("/") not in MARKS}
    _, posted = adapter_call(older, read)
    assert posted[-1]["new_version"] == "mark-3"


@pytest.mark.parametrize("route", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"])
def test_a_refusal_raises(adapter_call, route):
    with pytest.raises(UpdateRefusedError, match="there is no parameter of this name"):
        adapter_call(answers(**{route: REFUSED}), read)


COLOCATED = ["placement.generation=[0,1]", "placement.training=[0,1]"]
COLOCATED += ["inference_engine.memory_saver=true", "inference_engine.options={max_total_tokens: 4096}"]


def resolved(*overrides):
    return resolve(None, ["grpo"], ["inference_engine=sglang", "inference_engine.servers=2", *COLOCATED, *overrides])


def test_ipc_is_the_default_if_colocated_servers_can_read():
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
    ), "only one server can read a copy"
    disaggregated = ["placement.training=[2,3]"]
    assert resolved(*disaggregated).config.weight_sync.transport.target == "core/broadcast"


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement.training=[2,3]"],
        ["placement.generation=[0,0,1,1]", "inference_engine.servers=4"],
        ["inference_engine.data_parallel=2", "inference_engine.servers=1"],
    ],
)
def test_ipc_is_refused_if_servers_cannot_read(overrides):
    with pytest.raises(ConfigError) as caught:
        resolved("weight_sync.transport=ipc", *overrides)
    assert "weight_sync.transport is ipc, which needs servers of the run that are colocated" in str(caught.value)
