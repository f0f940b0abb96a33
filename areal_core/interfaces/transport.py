"""Weight transports: how new weights get from the trainer to the servers."""

from __future__ import annotations

from typing import Protocol


class TransferFailedError(Exception):
    """A server that responds may not have the weights. They are then synced through a folder."""


class WeightTransport(Protocol):
    """Sends the parameters of the trained model. Every rank of the trainer has one.

    It is constructed with its settings, and with those of the following arguments that its constructor has:

    - `engine`: the `TrainEngine` of the policy.
    - `rollouts`: on rank 0 the connection to the rollout controller; None on other ranks.
    - `address`: address of this machine, as servers reach it.
    - `gpu`: number of this rank's GPU, as in `placement`.
    - `timeout_s`: `weight_sync.timeout_s`, in seconds.

    It sends messages of its own (`areal_core.processes.Message`). The inference engine answers them
    (`InferenceEngine.answer`), and names the transport in `InferenceCapabilities.transports`. One of them is
    `SyncWeights`, with which the engine takes the new version: before the data of a broadcast, after the data that
    servers read.

    Example:
        >>> import torch
        >>> from areal_core.engines import Broadcast, TrainEngine, TransferFailedError, WeightTransport
        >>> class SmallBroadcast(WeightTransport):
        ...     # broadcasts up to 1 GiB; larger weights go through a folder
        ...     def __init__(self, engine, rollouts, address):
        ...         self._engine, self._broadcast = engine, Broadcast(engine, rollouts, address)
        ...
        ...     def send(self, version, trained):
        ...         size = sum(tensor.nbytes for _, tensor in self._engine.named_meta_parameters())
        ...         if size > 1 << 30:
        ...             raise TransferFailedError(f"{size >> 30} GiB are too large for a broadcast")
        ...         return self._broadcast.send(version, trained)
        >>> class Engine(TrainEngine):
        ...     def named_meta_parameters(self):
        ...         yield "lm_head.weight", torch.empty(1 << 30, device="meta")
        >>> SmallBroadcast(Engine(), None, "10.0.0.5").send(version=1, trained=0)
        Traceback (most recent call last):
            ...
        areal_core.interfaces.transport.TransferFailedError: 4 GiB are too large for a broadcast
    """

    def send(self, version: int, trained: int) -> bool:
        """Send the parameters, and return whether a server missed them and waits for a folder. Collective.

        Args:
            version: weight version of the parameters.
            trained: number of batches that they were trained on.

        Returns:
            Whether a server needs the folder, the same on every rank.

        Raises:
            TransferFailedError: on every rank. The weights are then synced through a folder.
        """
