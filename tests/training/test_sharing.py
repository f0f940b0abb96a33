"""The trainer's end of weights that are read in the memory of its GPUs; what a true GPU and server do is measured by
`benchmarks/gpu_runs.py`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from areal_core.config.sections import WeightSyncSection
from areal_core.errors import RunError
from areal_core.interfaces import TransferFailedError
from areal_core.interfaces.inference import SharedMemory, TensorDescription
from areal_core.messages.rollouts import Readers, ReadTensors, Synced, SyncWeights
from areal_core.training import sharing
from areal_core.training.sharing import TensorSharing
from areal_core.training.weight_sync import WeightSync

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHTS = {name: torch.arange(first, first + 64).float() for name, first in (("a", 0), ("b", 64), ("c", 128))}
WEIGHTS["large"] = torch.arange(1000).float().reshape(20, 50).T


class Rollouts:
    """Answers as the controller does: GPU 5 reads; refuses the beginning, a part, or the weight sync at the end."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.begun: list[int] = []
        self.parts: list[ReadTensors] = []
        self.synced: list[SyncWeights] = []

    def call(self, message: Any) -> Any:
        what = "end" if isinstance(message, SyncWeights) else "part" if message.tensors else "begin"
        if isinstance(message, SyncWeights):
            self.synced.append(message)
        elif message.tensors:
            self.parts.append(message)
        else:
            self.begun.append(message.version)
        if self.refused == what:
            raise RunError(f"no server at the {what}")
        return Readers((5,)) if isinstance(message, ReadTensors) else Synced(needs_folder=False)

    def request(self, message: Any) -> int:
        self.refused = ""
        self.call(message)
        return 1

    def wait(self, number: int) -> Synced:
        return Synced(needs_folder=False)


def gathered() -> Iterator[tuple[str, torch.Tensor]]:
    """One buffer for all: a tensor is valid until the next one is asked for."""
    buffer = torch.empty(1000)
    for name, value in WEIGHTS.items():
        view = buffer[: value.numel()].view(value.shape)
        view.copy_(value)
        yield name, view


ENGINE: Any = SimpleNamespace(named_full_parameters=gathered)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were shared, in order; each is named by its number in `handle`."""
    found: list[torch.Tensor] = []

    def share(tensor: torch.Tensor, gpu: int) -> SharedMemory:
        found.append(tensor)
        return SharedMemory(gpu, "GPU-1", f"{len(found):04x}", tensor.nbytes, 0, 0, "", 0)

    monkeypatch.setattr(sharing, "share_memory", share)
    monkeypatch.setattr(sharing, "PART_BYTES", 256)  # two of 64 values in bfloat16
    return found


def test_all_tensors_are_read_in_parts_and_then_synced(shared):
    rollouts: Any = Rollouts()
    assert not TensorSharing(ENGINE, rollouts, torch.bfloat16, gpu=5).send(3, 2)
    assert rollouts.begun == [3]
    parts = [[one.tensor.name for one in part.tensors] for part in rollouts.parts]
    assert parts == [["a", "b"], ["c"], ["large"]], "two to a part, and one that is larger by itself"
    assert {part.version for part in rollouts.parts} == {3}
    told = [one for part in rollouts.parts for one in part.tensors]
    assert [one.copies[0].handle for one in told] == ["0001", "0002", "0003", "0004"]
    assert {copy.gpu for one in told for copy in one.copies} == {5}
    assert told[-1].tensor == TensorDescription("large", "bfloat16", (50, 20))
    for tensor, value in zip(shared, WEIGHTS.values(), strict=True):
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert torch.equal(tensor, value.bfloat16()), "read after the engine has gone on to the next tensor"
    assert [(one.version, one.trained, one.folder) for one in rollouts.synced] == [(3, 2, None)]
    assert [one.name for one in rollouts.synced[0].tensors] == list(WEIGHTS)


@pytest.mark.parametrize(("refused", "parts"), [("begin", 0), ("part", 1), ("end", 4)])
def test_what_servers_refuse_goes_through_a_folder_from_then_on(refused, parts, shared, tmp_path, capsys):
    """What was shared and not read would be kept for ever."""
    rollouts: Any = Rollouts(refused)
    sharing = TensorSharing(ENGINE, rollouts, torch.float32, gpu=5)
    weight_sync = WeightSync(WeightSyncSection(), ENGINE, rollouts, sharing, [tmp_path], torch.float32)
    for _ in range(2):
        weight_sync.sync(0)
    assert len(rollouts.begun) == 1
    assert len(rollouts.parts) == parts, "no part is offered behind one that was refused"
    assert [one.folder for one in rollouts.synced if one.folder] == [tmp_path / "version-1", tmp_path / "version-2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"weights go through a folder from now on: no server at the {refused}"


def test_a_reader_on_a_gpu_without_a_rank_ends_it(shared, capsys):
    """Nobody could share its weights with it."""
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        TensorSharing(ENGINE, rollouts, torch.float32, gpu=4).send(1, 1)
    assert "no rank of the trainer has GPU 5" in capsys.readouterr().err
    assert not shared


def test_where_there_is_no_room_for_a_part_a_folder_is_used(monkeypatch, capsys):
    """Behind the beginning the servers have their memory again."""

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "to", full)
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        TensorSharing(ENGINE, rollouts, torch.float32, gpu=5).send(1, 1)
    assert "GPU 5: has no room for a part of the weights" in capsys.readouterr().err
    assert not rollouts.parts


def test_memory_that_is_no_gpus_cannot_be_shared(capsys):
    """As on this CPU."""
    rollouts: Any = Rollouts()
    with pytest.raises(TransferFailedError):
        TensorSharing(ENGINE, rollouts, torch.float32, gpu=5).send(1, 1)
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
    memory = sharing.share_memory(tensor, 0)
    place = [bytes.fromhex(memory.handle), memory.size, memory.offset, False]
    ends = [bytes.fromhex(memory.counter), memory.counter_offset, b"", False]
    kind = [torch.UntypedStorage, torch.bfloat16, 0]
    words = (torch.Tensor, tensor.shape, tensor.stride(), memory.start, *kind, *place, *ends)

    class Opened:
        def __reduce__(self):
            return rebuild_cuda_tensor, words

    told = subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(Opened()), capture_output=True, check=False
    )
    wanted = f"{sum(range(20, 60))}.0 (8, 5) torch.bfloat16"
    assert told.stdout.decode().split("\n")[0] == wanted, told.stderr.decode()
