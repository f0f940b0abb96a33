"""The interface between scheduler and model: logits of all live requests, and the memory that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from areal_hf.rows import Rows


class Decoder(Protocol):
    """Runs a model for the live requests, and caches states of their tokens.

    Attributes:
        bytes_per_row: memory of a request, without its tokens.
        bytes_per_token: memory of each token of a request.
    """

    bytes_per_row: int
    bytes_per_token: int

    def join(self, rows: Rows, start: int) -> None:
        """Add the requests of rows `start` and later, which have just joined."""

    def rebuild(self, rows: Rows) -> None:
        """Compute all cached states of the live requests again with new weights."""

    def logits(self, rows: Rows) -> torch.Tensor:
        """Return the logits [B, V] for the next token of every row. This also caches the newest tokens."""

    def remove(self, rows: Rows, ended: list[int], sources: list[int], targets: list[int]) -> None:
        """Remove the rows `ended`, which `rows` has removed already: rows `sources` have become rows `targets`."""
