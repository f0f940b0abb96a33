"""The transport `broadcast`: the main rank of the trainer broadcasts weights to the servers (NCCL, or gloo on CPUs).

The main rank and the servers form a group, which is kept while the same servers are ready. When one of them is missing
or too slow, the group is given up: the weights go through a folder, which every server can read, and the next sync
forms a new group.
"""

from __future__ import annotations

import sys
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
from areal_core.messages.rollouts import FormGroup
from areal_core.training.collectives import broadcast, open_store
from areal_core.training.weights_file import describe_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from areal_core.interfaces.inference import BroadcastGroup, TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.interfaces.transport import RolloutConnection

IN_FLIGHT_BYTES = 1 << 30
"""Bytes of tensors that may be in the hands of the backend at a time."""
POLL_S = 0.002
"""Seconds between two checks of a transfer under way."""


class Broadcast:
    """A `WeightTransport` to a group of servers; the same on every rank.

    Args:
        engine: the engine whose parameters are sent.
        rollouts: connection to the rollout controller, on the main rank; None on other ranks, which only take part in
            gathering parameters.
        address: address of this machine, as servers reach it.
        timeout_s: timeout of the whole broadcast, in seconds.
    """

    def __init__(
        self,
        engine: TrainEngine,
        rollouts: RolloutConnection | None,
        address: str = "127.0.0.1",
        timeout_s: float = 300.0,
    ) -> None:
        self._address = address
        self._engine = engine
        self._rollouts = rollouts
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""

    def send(self, version: int, trained: int) -> bool:
        """Broadcast all parameters, and return whether a server missed them and waits for a folder.

        Raises:
            TransferFailedError: on every rank; the servers may not have the weights.
        """
        tensors = describe_weights(self._engine)
        if not broadcast(float(self._rollouts is not None and self._join_group(self._rollouts))):
            raise TransferFailedError
        needs_folder = broadcast(self._send(version, trained, tensors))
        if needs_folder < 0:
            raise TransferFailedError
        return bool(needs_folder)

    def _join_group(self, rollouts: RolloutConnection) -> bool:
        """Join the group of the servers that are ready, and return whether there is one."""
        if self._store is None:  # one for all groups: each uses its name as a prefix of its keys
            self._store = open_store(self._address, self._timeout)
        request = FormGroup(self._address, self._store.port, self._backend, self._group_name)
        group: BroadcastGroup | None = rollouts.call(request).group
        if group is None:
            return False
        if not group.is_new:
            return True
        store: Any = self._store
        for prefix in group.prefixes:
            store = PrefixStore(prefix, store)
        try:
            if self._backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, 0, group.world_size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, 0, group.world_size, self._timeout)
        except RuntimeError as error:
            _log(f"the group of the servers could not be joined: {error}")
            return False
        self._group_name = group.name
        return True

    def _send(self, version: int, trained: int, tensors: tuple[TensorDescription, ...]) -> float:
        """Return 1 if a server waits for a folder, 0 if none does, and -1 if the broadcast failed."""
        rollouts = self._rollouts
        if rollouts is None:
            for _ in self._engine.named_full_parameters():  # the main rank cannot gather them alone
                continue
            return 0.0
        reply = rollouts.sync_weights(version, trained, tensors)
        parameters = self._engine.named_full_parameters()
        try:
            self._broadcast(parameters, rollouts, reply)
            return float(rollouts.wait(reply).needs_folder)
        except (TransferFailedError, RunError, RuntimeError) as error:
            _log(f"the broadcast of version {version} failed: {error}")
        # Leave the group only here: while an exception is handled, its frames keep the group alive.
        for _ in parameters:
            continue
        self._leave_group()
        with suppress(RunError):  # the servers give the update up
            rollouts.wait(reply)
        return -1.0

    def _broadcast(
        self, parameters: Iterator[tuple[str, torch.Tensor]], rollouts: RolloutConnection, reply: Future[Any]
    ) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        total = 0

        def wait_for_oldest() -> int:
            work, tensor = in_flight.popleft()
            while not work.is_completed():
                # No backend's own wait returns when the other side has given up. A reply before the end of the
                # broadcast can only be an error.
                if rollouts.has_failed(reply):
                    raise TransferFailedError("the servers gave it up")
                if time.monotonic() > deadline:
                    raise TransferFailedError(f"it took longer than weight_sync.timeout_s = {self._timeout}")
                time.sleep(POLL_S)
            work.wait()  # raises the error of a transfer that completed with one
            return tensor.nbytes

        for _, value in parameters:
            tensor = value.detach().to(self._device, copy=True).contiguous()
            in_flight.append((self._group.broadcast([tensor], options), tensor))
            total += tensor.nbytes
            while total > IN_FLIGHT_BYTES:
                total -= wait_for_oldest()
        while in_flight:
            wait_for_oldest()

    def _leave_group(self) -> None:
        group, self._group, self._group_name = self._group, None, ""
        if self._backend == "nccl" and group is not None:
            group.abort()
        # A gloo group ends with the last reference to it. Only then do the servers see that nothing more will come.
        del group


def _log(message: str) -> None:
    """Write a line to the trainer's log: the weights then go through a folder."""
    sys.stderr.write(f"{message}; the weights go through a folder\n")
