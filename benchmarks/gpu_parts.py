"""Data and reward of `gpu_runs.py`: prompts of random words, and a reward that random weights can learn."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RandomPrompts:
    """So many prompts of so many words."""

    def __init__(self, rows: int = 4096, words: int = 64) -> None:
        self._rows = rows
        self._words = words

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        draw = random.Random(index)
        return {"prompt": " ".join(f"w{draw.randrange(10, 50000)}" for _ in range(self._words))}


def lower_half(completion_ids: Sequence[int]) -> float:
    """The share of tokens from the lower half of the vocabulary: one half at first, one at best."""
    return sum(token < 75968 for token in completion_ids) / max(1, len(completion_ids))
