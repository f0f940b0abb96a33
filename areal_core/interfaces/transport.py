"""Weight transports: how new weights get from the trainer to the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from areal_core.interfaces.inference import TensorDescription


class TransferFailedError(Exception):
    """A server that responds may not have the weights. They are then synced through a folder."""


class WeightTransport(Protocol):
    """Sends the parameters of the trained model. Every rank of the trainer has one.

    It is constructed with its settings, and with those of the following arguments that its constructor has:

    - `engine`: the `TrainEngine` of the policy.
    - `rollouts`: on rank 0 the `RolloutConnection`; None on other ranks.
    - `address`: address of this machine, as servers reach it.
    - `gpu`: number of this rank's GPU, as in `placement`.
    - `timeout_s`: `weight_sync.timeout_s`, in seconds.

    It may send messages of its own (`areal_core.processes.Message`). The inference engine answers them
    (`InferenceEngine.answer`), and names the transport in `InferenceCapabilities.transports`.

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


class RolloutConnection(Protocol):
    """The connection of the trainer's rank 0 to the rollout controller, in which the inference engine lives.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from areal_core.engines import RolloutConnection, TrainEngine
        >>> from areal_core.processes import Message
        >>> class Parcel(Message):
        ...     # the engine's `answer` keeps the folder, and its `update_weights` loads it
        ...     folder: Path
        >>> class Parcels:
        ...     def __init__(self, engine: TrainEngine, rollouts: RolloutConnection | None) -> None:
        ...         self.engine, self.rollouts = engine, rollouts
        ...
        ...     def send(self, version, trained):
        ...         tensors = dict(self.engine.named_full_parameters())  # collective, so on every rank
        ...         if self.rollouts is not None:
        ...             folder = Path(f"/shared/weights/{version}")
        ...             folder.mkdir(parents=True)
        ...             save_file(tensors, folder / "model.safetensors")
        ...             self.rollouts.call(Parcel(folder))
        ...             self.rollouts.wait(self.rollouts.sync_weights(version, trained))
        ...         return False  # no server waits for another folder
    """

    def request(self, message: Any) -> Future[Any]:
        """Send a message to the inference engine and return immediately. `wait` returns the reply."""

    def sync_weights(self, version: int, trained: int, tensors: Sequence[TensorDescription] = ()) -> Future[Any]:
        """Let the engine take a new version of the weights: its `update_weights` is called.

        Call this before the data of a broadcast, or after data that servers read.

        Args:
            version: weight version.
            trained: number of batches that the weights were trained on.
            tensors: the tensors that follow in a broadcast, in this order, or that servers have read.

        Returns:
            The future of a reply with the attribute `needs_folder`: whether a server missed the weights and waits for
            them in a folder. It comes when the servers generate with the new weights.
        """

    def wait(self, reply: Future[Any]) -> Any:
        """Return the reply to a request.

        Raises:
            RunError: the engine reported an error, or the rollout controller has died.
        """

    def call(self, message: Any) -> Any:
        """Send a message and return its reply. Raises as `wait`."""

    def has_failed(self, reply: Future[Any]) -> bool:
        """Return whether the reply to a request has come and is an error, without waiting."""
