"""Weights read where they lie: servers on the trainer's own GPUs copy them from its memory (CUDA IPC), part by part.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#interprocess-communication
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import reduce_tensor

from areal_core.errors import RunError
from areal_core.interfaces.inference import SharedMemory, SharedTensor
from areal_core.messages.rollouts import PublishWeights, ReadTensors
from areal_core.training.broadcast import TransferFailedError
from areal_core.training.distribution import agree, gather_texts
from areal_core.training.weights_file import describe_weights, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from areal_core.interfaces.inference import TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.rollouts import RolloutClient

PART_BYTES = 1 << 28
"""Of tensors that lie ready for the servers at a time; one that is larger by itself is a part."""
MOST_FAILURES = 3
"""In a row; then a folder is used for the rest of this trainer's life."""


class TensorSharing:
    """Lets the servers on the trainer's GPUs read the parameters of an engine; the same on every rank.

    Every rank has each part on its own GPU, for the server there. A part is let go when all servers have read it, so
    that there is never more than one besides what they still hold of the one before.

    Args:
        engine: whose parameters.
        rollouts: the controller's end, on rank 0; None on other ranks.
        dtype: of the published weights.
        gpu: number of this rank's, as in `placement`.
    """

    def __init__(self, engine: TrainEngine, rollouts: RolloutClient | None, dtype: torch.dtype, gpu: int) -> None:
        self._engine = engine
        self._rollouts = rollouts
        self._dtype = dtype
        self._gpu = gpu
        self._tensors: tuple[TensorDescription, ...] = ()
        self._failures = 0
        self._fault = ""

    def send(self, version: int, trained: int) -> bool:
        """Have all parameters read; whether some server missed them and waits for a folder.

        Raises:
            TransferFailedError: on every rank; no server holds the new weights.
        """
        if self._failures == MOST_FAILURES:
            raise TransferFailedError
        self._tensors = self._tensors or describe_weights(self._engine, self._dtype)
        is_read = True
        for part in self._parts():
            is_read = is_read and self._is_read(version, part)
            del part
        missed = agree(self._complete(version, trained)) if is_read else -1.0
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # frees what the servers have let go
        if missed < 0:
            self._fail()
            raise TransferFailedError
        self._failures = 0
        return bool(missed)

    def _parts(self) -> Iterator[list[tuple[TensorDescription, torch.Tensor]]]:
        """The parameters, copied part by part; collective. The memory of a part is its own: a reader's last copy may
        be under way when it has answered, and PyTorch keeps that memory until the reader has let it go."""
        part: list[tuple[TensorDescription, torch.Tensor]] = []
        total = 0
        gathered = self._engine.named_full_parameters()
        for told, (_, value) in zip(self._tensors, gathered, strict=True):
            if part and total + size_of(told) > PART_BYTES:
                yield part
                part, total = [], 0
            part.append((told, value.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)))
            total += size_of(told)
        yield part

    def _is_read(self, version: int, part: Sequence[tuple[TensorDescription, torch.Tensor]]) -> bool:
        """Have a part read; whether it was."""
        try:
            own = json.dumps([asdict(share_memory(tensor, self._gpu)) for _, tensor in part])
        except RuntimeError as error:
            own = json.dumps(f"GPU {self._gpu}: {error}")
        ranks = [json.loads(found) for found in gather_texts(own)]
        if faults := [found for found in ranks if isinstance(found, str)]:
            self._fault, self._failures = faults[0], MOST_FAILURES  # the next time would be no other
            return False
        is_read = True
        if self._rollouts is not None:
            copies = (tuple(SharedMemory(**one) for one in each) for each in zip(*ranks, strict=True))
            told = tuple(SharedTensor(one, each) for (one, _), each in zip(part, copies, strict=True))
            try:
                self._rollouts.call(ReadTensors(version, told), f"servers to read weights of version {version}")
            except RunError as error:
                self._fault, is_read = error.message, False
        return bool(agree(float(is_read)))

    def _complete(self, version: int, trained: int) -> float:
        """1 where some server waits for a folder, 0 where none does, -1 where none has taken the weights over."""
        if self._rollouts is None:
            return 0.0
        try:
            request = PublishWeights(version, trained, None, self._tensors)
            return float(self._rollouts.call(request, f"version {version} to be taken over").needs_folder)
        except RunError as error:
            self._fault = error.message
            return -1.0

    def _fail(self) -> None:
        self._failures = min(self._failures + 1, MOST_FAILURES)
        if self._rollouts is not None:
            ever = " from now on" if self._failures == MOST_FAILURES else ""
            sys.stderr.write(f"weights were not read in GPU memory, and go through a folder{ever}: {self._fault}\n")


def share_memory(tensor: torch.Tensor, gpu: int) -> SharedMemory:
    """Where a tensor of a GPU lies, for one other process; its memory is kept until that one has let it go.

    Raises:
        RuntimeError: memory of this kind, or on this system, cannot be shared.
    """
    if not tensor.is_cuda:
        raise RuntimeError("the trainer's tensors are in no GPU's memory")
    torch.cuda.synchronize(tensor.device)
    _, told = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    handle, size, offset, _, counter, counter_offset, event, waits = told[7:]
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return SharedMemory(
        gpu, device, handle.hex(), size, offset, told[3], counter.hex(), counter_offset, event.hex(), waits
    )
