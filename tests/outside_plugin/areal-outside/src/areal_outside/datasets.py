"""A data set: its length, and the row of a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_outside.config import DoublingsSettings


class Doublings:
    """Sums of a number and itself; a row has the keys that the workflow and the reward read."""

    def __init__(self, settings: DoublingsSettings) -> None:
        self._count = settings.count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, str]:
        """A new row each time; the same number means the same row."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {"prompt": f"{index}+{index}=", "answer": str(2 * index)}
