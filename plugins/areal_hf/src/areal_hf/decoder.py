"""What the scheduler needs of a model: logits for the next token of all live requests, and the room that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from areal_hf.rows import Rows


class Decoder(Protocol):
    """Runs a model for the live requests, and keeps what the model remembers of their tokens.

    Attributes:
        bytes_per_row: memory of a request, however short.
        bytes_per_token: memory of each of its tokens.
    """

    bytes_per_row: int
    bytes_per_token: int

    def join(self, rows: Rows, start: int) -> None:
        """Take the requests of rows `start` and later, which have just joined."""

    def rebuild(self, rows: Rows) -> None:
        """Compute everything again that is remembered of the live requests: the weights have changed."""

    def logits(self, rows: Rows) -> torch.Tensor:
        """Return the logits [B, V] for the next token of every row; the newest tokens are remembered from now on."""

    def remove(self, rows: Rows, ended: list[int], sources: list[int], targets: list[int]) -> None:
        """Forget the rows `ended`, which `rows` has removed: then rows `sources` have become rows `targets`."""
