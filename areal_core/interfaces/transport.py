"""How new weights get from the trainer to the servers."""

from __future__ import annotations

from typing import Protocol


class TransferFailedError(Exception):
    """Not every server that answers has the weights for sure: they must go through a folder."""


class WeightTransport(Protocol):
    """Sends the parameters of the trained model. It lives on every rank of the trainer.

    Made with its settings and those of these that its constructor names: `engine`, the `TrainEngine`; `rollouts`, on
    rank 0 the connection to the rollout controller, None on other ranks; `dtype` of what is sent; `address` of this
    machine as servers reach it; `gpu`, this rank's number in `placement`; `timeout_s`.

    Its messages to the servers are its own (`areal_core.messages.Message`): the inference engine answers them
    (`Questioned`), and names the transport in `InferenceCapabilities.transports`. They end with `SyncWeights`, on
    which the engine sets the version.
    """

    def send(self, version: int, trained: int) -> bool:
        """Send the parameters as `version`, after so many trained batches. Called on all ranks together.

        Returns:
            Whether a server missed them and waits for a folder; every rank returns the same.

        Raises:
            TransferFailedError: on every rank; the weights then go through a folder.
        """
