"""Weights by collective broadcast: rank 0 of the trainer sends, the inference engines receive.

The group has a generation. It is formed with the engines that are ready, kept while they stay the same, and given up
with the first member that is missing or too slow; the weights then go through a folder, which everybody can read.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from areal_core.errors import RunError
from areal_core.interfaces.transport import TransferFailedError
from areal_core.messages.rollouts import FormGroup, SyncWeights
from areal_core.training.distribution import agree, open_store
from areal_core.training.weights_file import describe_weights

if TYPE_CHECKING:
    from concurrent.futures import Future

    from areal_core.interfaces.inference import BroadcastGroup, TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.rollouts import RolloutClient

IN_FLIGHT_BYTES = 1 << 30
"""Of tensors that were handed to the network and have not left yet."""
POLL_S = 0.002


class Broadcast:
    """A `WeightTransport` to the group of inference servers that stands; the same on every rank.

    Args:
        engine: whose parameters.
        rollouts: the controller's end, on rank 0; None on other ranks, which only help to gather.
        dtype: of the synced weights.
        address: of this machine, as servers reach it.
        timeout_s: for the whole broadcast.
    """

    def __init__(
        self,
        engine: TrainEngine,
        rollouts: RolloutClient | None,
        dtype: torch.dtype,
        address: str = "127.0.0.1",
        timeout_s: float = 300.0,
    ) -> None:
        self._address = address
        self._engine = engine
        self._rollouts = rollouts
        self._dtype = dtype
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._store: Any = None
        self._group: Any = None
        self._name = ""

    def send(self, version: int, trained: int) -> bool:
        """Form a group where none stands, and send; whether some engine missed it and waits for a folder.

        Raises:
            TransferFailedError: on every rank; some engine may have taken nothing over.
        """
        tensors = describe_weights(self._engine, self._dtype)
        if not agree(float(self._rollouts is not None and self._stands(self._rollouts))):
            raise TransferFailedError
        missed = agree(self._send(version, trained, tensors))
        if missed < 0:
            raise TransferFailedError
        return bool(missed)

    def _stands(self, rollouts: RolloutClient) -> bool:
        """Whether a group stands."""
        if self._store is None:  # one for all groups: the name of each is in front of its keys
            self._store = open_store(self._address, self._timeout)
        wanted = FormGroup(self._address, self._store.port, self._backend, self._name)
        group: BroadcastGroup | None = rollouts.call(wanted).group
        if group is None:
            return False
        if not group.is_new:
            return True
        prefixed: Any = self._store
        for prefix in group.prefixes:
            prefixed = PrefixStore(prefix, prefixed)
        try:
            if self._backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(prefixed, 0, group.world_size, options)
            else:
                self._group = dist.ProcessGroupGloo(prefixed, 0, group.world_size, self._timeout)
        except RuntimeError:
            return False
        self._name = group.name
        return True

    def _send(self, version: int, trained: int, tensors: tuple[TensorDescription, ...]) -> float:
        """1 where some engine waits for a folder, 0 where none does, -1 where the broadcast has failed."""
        rollouts = self._rollouts
        if rollouts is None:
            for _ in self._engine.named_full_parameters():  # rank 0 must be able to gather all of it
                continue
            return 0.0
        number = rollouts.request(SyncWeights(version, trained, None, tensors))
        gathered = self._engine.named_full_parameters()
        is_answered = False
        # Given up outside of these blocks: while an exception lives, its frames hold the group.
        try:
            self._broadcast(gathered, rollouts, number)
        except (TransferFailedError, RunError, RuntimeError):
            pass
        else:
            with suppress(RunError):
                return float(rollouts.wait(number).needs_folder)
            is_answered = True  # there is one answer, and whoever waited for another would wait for ever
        for _ in gathered:
            continue
        self._give_up()
        if not is_answered:
            with suppress(RunError):  # that it failed is known
                rollouts.wait(number)
        return -1.0

    def _broadcast(self, gathered: Any, rollouts: RolloutClient, number: Future[Any]) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        total = 0

        def wait_for_oldest() -> int:
            work, tensor = in_flight.popleft()
            while not work.is_completed():
                # Polled, because no backend's own wait notices that the other side has given up: a reply before the
                # end of the broadcast can but be an error.
                if rollouts.has_failed(number) or time.monotonic() > deadline:
                    raise TransferFailedError
                time.sleep(POLL_S)
            work.wait()
            return tensor.nbytes

        for _, value in gathered:
            tensor = value.detach().to(self._device, self._dtype, copy=True).contiguous()
            in_flight.append((self._group.broadcast([tensor], options), tensor))
            total += tensor.nbytes
            while total > IN_FLIGHT_BYTES:
                total -= wait_for_oldest()
        while in_flight:
            wait_for_oldest()

    def _give_up(self) -> None:
        group, self._group, self._name = self._group, None, ""
        if self._backend == "nccl" and group is not None:
            group.abort()
        # gloo ends with its last reference: only then do the others hear that nothing more will come.
        del group
