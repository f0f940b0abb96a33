"""The trainer's side of the transport `ipc`. `benchmarks/gpu_runs.py` runs it with a true GPU and server."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.config.sections import WeightSyncSection
from areal_core.engines import TransferFailedError
from areal_core.errors import RunError
from areal_core.interfaces.inference import SharedMemory, TensorDescription
from areal_core.messages.rollouts import Readers, ReadTensors, Synced, SyncWeights
from areal_core.training import ipc
from areal_core.training.ipc import CudaIpc
from areal_core.training.weight_sync import WeightFolder, WeightSync
from tests.training.engines import engine_that_gathers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHTS = {name: torch.arange(first, first + 64).bfloat16() for name, first in (("a", 0), ("b", 64), ("c", 128))}
WEIGHTS["large"] = torch.arange(1000).reshape(20, 50).T


class Rollouts:
    """A client of a controller whose server on GPU 5 reads, and may refuse the beginning, a part, or the sync."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.begun: list[int] = []
        self.parts: list[ReadTensors] = []
        self.synced: list[SyncWeights] = []

    def call(self, message: ReadTensors) -> Readers:
        what = "part" if message.tensors else "begin"
        if message.tensors:
            self.parts.append(message)
        else:
            self.begun.append(message.version)
        self._refuse(what)
        return Readers((5,))

    def sync_weights(self, version: int, trained: int, tensors: Any = (), folder: Path | None = None) -> int:
        if folder is not None:
            self.refused = ""
        self.synced.append(SyncWeights(version, trained, folder, tensors))
        return 1

    def wait(self, number: int) -> Synced:
        self._refuse("end")
        return Synced(needs_folder=False)

    def _refuse(self, what: str) -> None:
        if self.refused == what:
            raise RunError(f"no server at the {what}")


def gathered() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a dtype in one buffer: each is valid until the next one is asked for."""
    buffers = {value.dtype: torch.empty(1000, dtype=value.dtype) for value in WEIGHTS.values()}
    for name, value in WEIGHTS.items():
        view = buffers[value.dtype][: value.numel()].view(value.shape)
        view.copy_(value)
        yield name, view


ENGINE: Any = engine_that_gathers(gathered)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the list of shared tensors, in order. The handle of each is its number."""
    found: list[torch.Tensor] = []

    def share(tensor: torch.Tensor, gpu: int) -> SharedMemory:
        found.append(tensor)
        return SharedMemory(gpu, "GPU-1", f"{len(found):04x}", tensor.nbytes, 0, 0, "", 0)

    monkeypatch.setattr(ipc, "share_memory", share)
    monkeypatch.setattr(ipc, "PART_BYTES", 256)  # two of 64 values in bfloat16
    return found


def test_all_tensors_are_read_in_parts_and_then_synced(shared):
    rollouts: Any = Rollouts()
    assert not CudaIpc(ENGINE, rollouts, gpu=5).send(3, 2)
    assert rollouts.begun == [3]
    parts = [[one.tensor.name for one in part.tensors] for part in rollouts.parts]
    assert parts == [["a", "b"], ["c"], ["large"]], "two to a part, and one that is larger by itself"
    assert {part.version for part in rollouts.parts} == {3}
    shared_tensors = [one for part in rollouts.parts for one in part.tensors]
    assert [one.copies[0].handle for one in shared_tensors] == ["0001", "0002", "0003", "0004"]
    assert {copy.gpu for one in shared_tensors for copy in one.copies} == {5}
    assert shared_tensors[-1].tensor == TensorDescription("large", "int64", (50, 20))
    for tensor, value in zip(shared, WEIGHTS.values(), strict=True):
        assert tensor.dtype == value.dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, value), "read after the engine has gone on to the next tensor"
    assert [(one.version, one.trained, one.folder) for one in rollouts.synced] == [(3, 2, None)]
    assert [one.name for one in rollouts.synced[0].tensors] == list(WEIGHTS)


@pytest.mark.parametrize(("refused", "parts"), [("begin", 0), ("part", 1), ("end", 3)])
def test_what_servers_refuse_goes_through_a_folder_from_then_on(refused, parts, shared, tmp_path, capsys):
    """Memory that was shared and never read would never be freed."""
    rollouts: Any = Rollouts(refused)
    transport, folder = CudaIpc(ENGINE, rollouts, gpu=5), WeightFolder(ENGINE, [tmp_path])
    weight_sync = WeightSync(WeightSyncSection(), ENGINE, rollouts, transport, folder)
    for _ in range(2):
        weight_sync.sync(0)
    assert len(rollouts.begun) == 1
    assert len(rollouts.parts) == parts, "no part is offered behind one that was refused"
    assert [one.folder for one in rollouts.synced if one.folder] == [tmp_path / "version-1", tmp_path / "version-2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"weights go through a folder from now on: no server at the {refused}"


def test_a_reader_on_a_gpu_without_a_rank_ends_it(shared, capsys):
    """No rank can share weights with that reader."""
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        CudaIpc(ENGINE, rollouts, gpu=4).send(1, 1)
    assert "no rank of the trainer has GPU 5" in capsys.readouterr().err
    assert not shared


def test_where_there_is_no_room_for_a_part_a_folder_is_used(monkeypatch, capsys):
    """After the beginning the servers have taken their memory back."""

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        CudaIpc(ENGINE, rollouts, gpu=5).send(1, 1)
    assert "GPU 5: has no room for a part of the weights" in capsys.readouterr().err
    assert not rollouts.parts


def test_memory_that_is_no_gpus_cannot_be_shared(capsys):
    """The trainer is on a CPU here."""
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        CudaIpc(ENGINE, rollouts, gpu=5).send(1, 1)
    assert "GPU 5: the trainer is on no GPU" in capsys.readouterr().err


READER = """
import pickle, sys, torch
tensor = pickle.load(sys.stdin.buffer)
print(tensor.float().sum().item(), tuple(tensor.shape), tensor.dtype)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_the_memory_of_a_true_gpu():
    whole = torch.arange(60, device="cuda", dtype=torch.bfloat16)
    tensor = whole[20:].view(8, 5)  # not at the beginning of its storage
    memory = ipc.share_memory(tensor, 0)
    place = [bytes.fromhex(memory.handle), memory.size, memory.offset, False]
    ends = [bytes.fromhex(memory.counter), memory.counter_offset, b"", False]
    kind = [torch.UntypedStorage, torch.bfloat16, 0]
    words = (torch.Tensor, tensor.shape, tensor.stride(), memory.start, *kind, *place, *ends)

    class Opened:
        def __reduce__(self):
            return rebuild_cuda_tensor, words

    reader = subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(Opened()), capture_output=True, check=False
    )
    wanted = f"{sum(range(20, 60))}.0 (8, 5) torch.bfloat16"
    assert reader.stdout.decode().split("\n")[0] == wanted, reader.stderr.decode()
