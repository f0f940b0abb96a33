"""The transport `ipc`: servers on the trainer's GPUs copy weights from its memory (CUDA IPC), part by part.

    main rank                            controller, servers
    ReadTensors (no tensors)      ──►    stop generating; which GPUs will read?
    for each part of the weights:
        every rank with a reader shares its copy of the part
        ReadTensors (the part)    ──►    copy it; which GPUs will read the next part?
    SyncWeights                   ──►    take the new version

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
from areal_core.messages.rollouts import ReadTensors
from areal_core.training.collectives import all_gather, all_gather_text, broadcast, broadcast_text, is_main
from areal_core.training.weights_file import describe_weights, size_of

if TYPE_CHECKING:
    from areal_core.interfaces.inference import TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.interfaces.transport import RolloutConnection

PART_BYTES = 1 << 28
"""Bytes of tensors that are shared at a time. A larger tensor is a part of its own."""

Part = list[tuple["TensorDescription", "torch.Tensor | None"]]
"""Tensors with this rank's copies; None if it has none."""


class CudaIpc:
    """A `WeightTransport` to servers on the trainer's GPUs; the same on every rank.

    Each rank on whose GPU a server reads has a copy of the part that is shared. PyTorch keeps the memory of the copy
    until the reader has released it, and for ever if the reader dies before that. So nothing is shared any more after
    the first failure.

    Args:
        engine: whose parameters are shared.
        rollouts: connection to the rollout controller, on the main rank; None on other ranks.
        gpu: number of this rank's GPU, as in `placement`.
    """

    def __init__(self, engine: TrainEngine, rollouts: RolloutConnection | None, gpu: int) -> None:
        self._engine = engine
        self._rollouts = rollouts
        self._gpu = gpu
        self._readers: set[int] = set()  # GPUs on which servers will read the next part
        self._failure = ""

    def send(self, version: int, trained: int) -> bool:
        """Let the servers read all parameters, and return whether one missed them and waits for a folder.

        Raises:
            TransferFailedError: on every rank; no server has the new weights.
        """
        if self._failure:
            raise TransferFailedError
        tensors = describe_weights(self._engine)
        gpus = {int(gpu) for gpu in all_gather(self._gpu)}
        self._share([], version)
        if self._readers - gpus:
            self._fail(f"no rank of the trainer has GPU {min(self._readers - gpus)}")
        if self._readers:
            self._share_all(version, tensors)
        needs_folder = broadcast(self._complete(version, trained, tensors)) if self._readers else -1.0
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # frees what the servers have released
        if needs_folder < 0:
            self._failure = broadcast_text(self._failure) or "it failed"
            if is_main():
                sys.stderr.write(f"weights go through a folder from now on: {self._failure}\n")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise TransferFailedError
        return bool(needs_folder)

    def _share_all(self, version: int, tensors: tuple[TensorDescription, ...]) -> None:
        part: Part = []
        size = 0
        for tensor, (_, value) in zip(tensors, self._engine.named_full_parameters(), strict=True):
            if part and size + size_of(tensor) > PART_BYTES:
                self._share(part, version)
                part, size = [], 0
            part.append((tensor, self._copy(value)))
            size += size_of(tensor)
        self._share(part, version)

    def _copy(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return a copy to be read; None if no server reads on this GPU, or if the GPU has no room."""
        if self._gpu not in self._readers:
            return None
        try:
            return value.detach().clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            return None

    def _share(self, part: Part, version: int) -> None:
        """Let the servers that have read all parts so far read another one. An empty part is the beginning. Collective.

        Afterwards `_readers` are the GPUs of the servers that will read the next part; none after a failure.
        """
        if part and not self._readers:
            return
        shared, failure = [], ""
        if self._gpu in self._readers:
            try:
                shared = [asdict(share_memory(copy, self._gpu)) for _, copy in part]
            except RuntimeError as error:
                failure = f"GPU {self._gpu}: {error}"
        ranks = [json.loads(text) for text in all_gather_text(json.dumps([shared, failure]))]
        failures = [failure for _, failure in ranks if failure]
        if failures:
            self._fail(failures[0])
            return
        if self._rollouts is not None:
            copies_of_tensors = zip(*(shared for shared, _ in ranks if shared), strict=True)
            offered = [
                SharedTensor(tensor, tuple(SharedMemory(**copy) for copy in copies))
                for (tensor, _), copies in zip(part, copies_of_tensors, strict=True)
            ]
            try:
                self._readers = set(self._rollouts.call(ReadTensors(version, tuple(offered))).gpus)
            except RunError as error:
                self._fail(error.message)
        self._readers = set(json.loads(broadcast_text(json.dumps(sorted(self._readers)))))

    def _fail(self, failure: str) -> None:
        self._readers = set()
        self._failure = self._failure or failure

    def _complete(self, version: int, trained: int, tensors: tuple[TensorDescription, ...]) -> float:
        """Return 1 if a server waits for a folder, 0 if none does, and -1 if no server took the weights."""
        if self._rollouts is None:
            return 0.0
        try:
            reply = self._rollouts.wait(self._rollouts.sync_weights(version, trained, tensors))
            return float(reply.needs_folder)
        except RunError as error:
            self._fail(error.message)
            return -1.0


def share_memory(tensor: torch.Tensor | None, gpu: int) -> SharedMemory:
    """Return a handle of a tensor on a GPU for one other process. Its memory is kept until that process releases it.

    Raises:
        RuntimeError: there is no such tensor, or its memory cannot be shared.
    """
    if tensor is None:
        raise RuntimeError("has no room for a part of the weights")
    if not tensor.is_cuda:
        raise RuntimeError("the trainer is on no GPU")
    torch.cuda.synchronize(tensor.device)  # then the reader has nothing to wait for
    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    handle, size, offset, _, counter, counter_offset = arguments[7:13]
    start = arguments[3]
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return SharedMemory(gpu, device, handle.hex(), size, offset, start, counter.hex(), counter_offset)
