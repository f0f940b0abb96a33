"""Weights by collective broadcast: rank 0 of the trainer sends, the inference engines receive.

The group has an epoch. It is formed with the engines that are ready, kept while they stay the same, and given up with
the first member that is missing or too slow; the weights then go through a folder, which everybody can read.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_core.errors import RunError
from areal_core.interfaces.inference import TensorDescription

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.interfaces.source import BroadcastTarget
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.publication import Publisher

IN_FLIGHT_BYTES = 1 << 30
"""Of tensors that were handed to the network and have not left yet."""
POLL_S = 0.002


class BroadcastFailedError(Exception):
    """The broadcast did not reach everybody; the group is gone."""


class Broadcaster:
    """Publishes by broadcast, and through a folder where that fails. The same on every rank.

    Args:
        engine: whose parameters.
        folders: writes them to a folder, for the first version and for those who missed a broadcast.
        target: the engines, on rank 0.
        dtype: of the published weights.
        address: under which other machines reach this one.
        timeout_s: for a group to form and for a broadcast to end.
    """

    def __init__(
        self,
        engine: TrainEngine,
        folders: Publisher,
        target: BroadcastTarget | None,
        dtype: torch.dtype,
        *,
        address: str,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._folders = folders
        self._target = target
        self._dtype = dtype
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._tensors: tuple[TensorDescription, ...] = ()
        self._store: Any = None
        self._group: Any = None
        self._name = ""

    def publish(self, version: int, trained: int) -> None:
        """See `Publisher.publish`."""
        if not self._tensors:
            self._describe()
        if self._agree(self._form_group()) and self._agree(self._send(version, trained)):
            if self._agree(self._target is not None and self._target.needs_folder):
                folder = self._folders.write(version)
                if self._target is not None:
                    self._target.offer_folder(version, folder)
            return
        self._name, self._group = "", None
        self._folders.publish(version, trained)

    def write(self, version: int) -> Path:
        """See `Publisher.write`."""
        return self._folders.write(version)

    def _describe(self) -> None:
        dtype = str(self._dtype).removeprefix("torch.")
        self._tensors = tuple(
            TensorDescription(name, dtype, tuple(value.shape)) for name, value in self._engine.named_full_parameters()
        )

    def _form_group(self) -> bool:
        """Whether a group stands, on rank 0."""
        if self._target is None:
            return False
        if self._store is None:  # one for all groups: the name of each is in front of its keys
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        group = self._target.form_group(self._address, self._store.port, self._backend, self._name)
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

    def _send(self, version: int, trained: int) -> bool:
        """Whether the engines took over what was sent; every rank takes part in gathering the parameters."""
        target = self._target
        if target is not None:
            target.begin_broadcast(version, trained, self._tensors)
        deadline = time.monotonic() + self._timeout.total_seconds()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        total, failed = 0, False
        for _, value in self._engine.named_full_parameters():
            if target is None or failed:
                continue  # the other ranks must be able to gather all of it
            tensor = value.detach().to(self._device, self._dtype, copy=True).contiguous()
            try:
                in_flight.append((self._group.broadcast([tensor], options), tensor))
                total += tensor.nbytes
                while total > IN_FLIGHT_BYTES:
                    total -= self._wait(in_flight, deadline)
            except (BroadcastFailedError, RuntimeError):
                failed = True
        if target is None:
            return False
        try:
            while in_flight and not failed:
                self._wait(in_flight, deadline)
            if not failed:
                target.end_broadcast()
                return True
        except (BroadcastFailedError, RuntimeError, RunError):
            pass
        in_flight.clear()  # each of them holds the group
        self._give_up()
        return False

    def _wait(self, in_flight: deque[tuple[Any, torch.Tensor]], deadline: float) -> int:
        """Until the oldest tensor has left; its size in bytes."""
        assert self._target is not None
        work, tensor = in_flight.popleft()
        while not work.is_completed():
            # Polled, because no backend's own wait notices that the other side has given up.
            if self._target.broadcast_failed() or time.monotonic() > deadline:
                raise BroadcastFailedError
            time.sleep(POLL_S)
        work.wait()
        return tensor.nbytes

    def _give_up(self) -> None:
        group, self._group, self._name = self._group, None, ""
        if self._backend == "nccl" and group is not None:
            group.abort()
        # gloo ends with its last reference: only then do the others hear that nothing more will come.
        del group
        if self._target is not None:
            self._target.drop_broadcast()

    @staticmethod
    def _agree(on_first: bool) -> bool:
        """Rank 0's answer on every rank."""
        shared = torch.tensor([int(on_first)])
        if dist.get_world_size() > 1:
            dist.broadcast(shared, 0)
        return bool(shared)
