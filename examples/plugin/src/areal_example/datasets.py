"""A data set: its length, and the row of a number."""

from __future__ import annotations

from typing import Annotated

from areal_core.plugins import register
from pydantic import Field


@register("datasets")
class Doublings:
    """Sums of a number and itself; a row has the keys that the workflow and the reward read."""

    def __init__(
        self, count: Annotated[int, Field(gt=0, description="Number of rows, starting with 0+0=.")] = 50
    ) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, str]:
        """Return a new row each time; the same number means the same row."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {"prompt": f"{index}+{index}=", "answer": str(2 * index)}
