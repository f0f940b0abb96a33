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
from areal_core.interfaces.transport import TransferFailedError
from areal_core.messages.rollouts import ReadTensors, SyncWeights
from areal_core.training.distribution import agree, gather, gather_texts, share_text
from areal_core.training.weights_file import describe_weights, size_of

if TYPE_CHECKING:
    from areal_core.interfaces.inference import TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.rollouts import RolloutClient

PART_BYTES = 1 << 28
"""Of tensors that lie ready for the servers at a time; one that is larger by itself is a part."""

Part = list[tuple["TensorDescription", "torch.Tensor | None"]]
"""Tensors, None where this rank has no copy."""


class TensorSharing:
    """A `WeightTransport` for servers on the trainer's GPUs, which read its parameters; the same on every rank.

    The ranks on whose GPUs somebody reads have each part there. PyTorch keeps its memory until the reader has let it
    go, and for ever where the reader dies before that: after a first failure nothing is shared any more.

    Args:
        engine: whose parameters.
        rollouts: the controller's end, on rank 0; None on other ranks.
        dtype: of the synced weights.
        gpu: number of this rank's, as in `placement`.
    """

    def __init__(self, engine: TrainEngine, rollouts: RolloutClient | None, dtype: torch.dtype, gpu: int) -> None:
        self._engine = engine
        self._rollouts = rollouts
        self._dtype = dtype
        self._gpu = gpu
        self._readers: set[int] = set()
        self._fault = ""

    def send(self, version: int, trained: int) -> bool:
        """Have all parameters read; whether some server missed them and waits for a folder.

        Raises:
            TransferFailedError: on every rank; no server holds the new weights.
        """
        if self._fault:
            raise TransferFailedError
        tensors = describe_weights(self._engine, self._dtype)
        gpus = {int(gpu) for gpu in gather(self._gpu)}
        self._offer(version, [])
        if self._readers - gpus:
            self._fail(f"no rank of the trainer has GPU {min(self._readers - gpus)}")
        if self._readers:
            self._offer_all(version, tensors)
        missed = agree(self._complete(version, trained, tensors)) if self._readers else -1.0
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # frees what the servers have let go
        if missed < 0:
            self._fault = share_text(self._fault) or "it failed"
            if self._rollouts is not None:
                sys.stderr.write(f"weights go through a folder from now on: {self._fault}\n")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise TransferFailedError
        return bool(missed)

    def _offer_all(self, version: int, tensors: tuple[TensorDescription, ...]) -> None:
        part: Part = []
        for told, (_, value) in zip(tensors, self._engine.named_full_parameters(), strict=True):
            if part and sum(size_of(one) for one, _ in part) + size_of(told) > PART_BYTES:
                self._offer(version, part)
                part = []
            part.append((told, self._copy(value)))
        self._offer(version, part)

    def _copy(self, value: torch.Tensor) -> torch.Tensor | None:
        """A copy to be read, where somebody reads on this GPU and there is room."""
        if self._gpu not in self._readers:
            return None
        try:
            return value.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            return None

    def _offer(self, version: int, part: Part) -> None:
        """Have a part read by those who have read all before it; none is what begins. Collective."""
        if part and not self._readers:
            return
        shared, fault = [], ""
        if self._gpu in self._readers:
            try:
                shared = [asdict(share_memory(tensor, self._gpu)) for _, tensor in part]
            except RuntimeError as error:
                fault = f"GPU {self._gpu}: {error}"
        ranks = [json.loads(found) for found in gather_texts(json.dumps([shared, fault]))]
        if faults := [fault for _, fault in ranks if fault]:
            self._fail(faults[0])
            return
        if self._rollouts is not None:
            copies = zip(*(shared for shared, _ in ranks if shared), strict=True)
            told = [
                SharedTensor(one, tuple(SharedMemory(**each) for each in memory))
                for (one, _), memory in zip(part, copies, strict=True)
            ]
            try:
                request = ReadTensors(version, tuple(told))
                readers = self._rollouts.call(request)
                self._readers = set(readers.gpus)
            except RunError as error:
                self._fail(error.message)
        self._readers = set(json.loads(share_text(json.dumps(sorted(self._readers)))))

    def _fail(self, fault: str) -> None:
        self._fault, self._readers = fault, set()

    def _complete(self, version: int, trained: int, tensors: tuple[TensorDescription, ...]) -> float:
        """1 where some server waits for a folder, 0 where none does, -1 where none has taken the weights over."""
        if self._rollouts is None:
            return 0.0
        try:
            request = SyncWeights(version, trained, None, tensors)
            return float(self._rollouts.call(request).needs_folder)
        except RunError as error:
            self._fail(error.message)
            return -1.0


def share_memory(tensor: torch.Tensor | None, gpu: int) -> SharedMemory:
    """Where a tensor of a GPU lies, for one other process; its memory is kept until that one has let it go.

    Raises:
        RuntimeError: there is no such tensor, or its memory cannot be shared.
    """
    if tensor is None or not tensor.is_cuda:
        raise RuntimeError("has no room for a part of the weights" if tensor is None else "the trainer is on no GPU")
    torch.cuda.synchronize(tensor.device)  # then the reader has nothing to wait for
    _, told = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    handle, size, offset, _, counter, counter_offset = told[7:13]
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return SharedMemory(gpu, device, handle.hex(), size, offset, told[3], counter.hex(), counter_offset)
