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

from areal_core.config.sections import PublicationSection
from areal_core.errors import RunError
from areal_core.interfaces.inference import SharedMemory, TensorDescription
from areal_core.messages.rollouts import Published, PublishWeights, ReadTensors
from areal_core.training import sharing
from areal_core.training.broadcast import TransferFailedError
from areal_core.training.publication import Publication
from areal_core.training.sharing import TensorSharing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")

WEIGHTS = {name: torch.arange(first, first + 64).float() for name, first in (("a", 0), ("b", 64), ("c", 128))}
WEIGHTS["large"] = torch.arange(1000).float().reshape(20, 50).T


class Rollouts:
    """Answers as the controller does; refuses the part of this number, or the publication at the end."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.parts: list[ReadTensors] = []
        self.published: list[PublishWeights] = []

    def call(self, message: Any, waiting_for: str) -> Any:
        if isinstance(message, ReadTensors):
            self.parts.append(message)
            if self.refused == "part":
                raise RunError("no server has read them")
        else:
            assert isinstance(message, PublishWeights)
            self.published.append(message)
            if self.refused == "end":
                raise RunError("no server took over the weights")
        return Published(needs_folder=False)

    def request(self, message: Any) -> int:
        self.call(message, "")
        return 1

    def wait(self, number: int, waiting_for: str) -> Published:
        return Published(needs_folder=False)


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
        return SharedMemory(gpu, "GPU-1", f"{len(found):04x}", tensor.nbytes, 0, 0, "", 0, "", waits=False)

    monkeypatch.setattr(sharing, "share_memory", share)
    monkeypatch.setattr(sharing, "PART_BYTES", 256)  # two of 64 values in bfloat16
    return found


def test_all_tensors_are_read_in_parts_and_then_published(shared):
    rollouts: Any = Rollouts()
    assert not TensorSharing(ENGINE, rollouts, torch.bfloat16, gpu=5).send(3, 2)
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
    assert [(one.version, one.trained, one.folder) for one in rollouts.published] == [(3, 2, None)]
    assert [one.name for one in rollouts.published[0].tensors] == list(WEIGHTS)


@pytest.mark.parametrize("refused", ["part", "end"])
def test_what_servers_refuse_goes_through_a_folder_and_after_three_times_always(refused, shared, capsys):
    rollouts: Any = Rollouts(refused)
    sender = TensorSharing(ENGINE, rollouts, torch.float32, gpu=0)
    for version in (1, 2, 3):
        with pytest.raises(TransferFailedError):
            sender.send(version, version)
    tried = len(rollouts.parts)
    assert tried == (3 if refused == "part" else 12), "no part is offered behind one that was refused"
    with pytest.raises(TransferFailedError):
        sender.send(4, 4)
    assert len(rollouts.parts) == tried
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert ["from now on" in line for line in lines] == [False, False, True]
    assert "no server" in lines[0]


def test_a_success_forgets_failures(shared):
    rollouts: Any = Rollouts()
    sender = TensorSharing(ENGINE, rollouts, torch.float32, gpu=0)
    for version, refused in enumerate(["part", "end", "", "part", "end", ""]):
        rollouts.refused = refused
        if refused:
            with pytest.raises(TransferFailedError):
                sender.send(version, version)
        else:
            sender.send(version, version)


def test_where_memory_cannot_be_shared_a_folder_is_used_at_once_and_for_good(tmp_path: Path, capsys):
    """As on this CPU."""
    rollouts: Any = Rollouts()
    section = PublicationSection(transport="ipc")
    publication = Publication(section, ENGINE, rollouts, [tmp_path], torch.float32, gpu=2)
    for _ in range(2):
        publication.publish(0)
    assert not rollouts.parts
    assert [one.folder for one in rollouts.published] == [tmp_path / "version-1", tmp_path / "version-2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "go through a folder from now on: GPU 2: the trainer's tensors are in no GPU's memory" in line


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
    ends = [bytes.fromhex(memory.counter), memory.counter_offset, bytes.fromhex(memory.event), memory.waits]
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
