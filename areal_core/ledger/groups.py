"""A prompt group: the episodes of one prompt, from the moment it is dispatched to the batch that consumes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.record import Record


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and its episodes.

    Attributes:
        number: position of the group in the order of the data, and its `group_id`.
        prompt_id: (data row, epoch).
        record: reference to the trajectories of its episodes; None for a group without data.
        oldest: oldest weight version that sampled one of their tokens; -1 if no token was sampled.
    """

    number: int
    prompt_id: tuple[int, int]
    record: Record | None = None
    oldest: int = -1

    def staleness(self, synced: Mapping[int, int], trained: int) -> int:
        """Batches between the weights of its oldest sampled token and the batch that would consume it now.

        Args:
            synced: for each weight version the batches trained when it was synced.
            trained: batches trained before the one that would consume it.
        """
        return 0 if self.oldest < 0 else max(0, trained - synced[self.oldest])
