"""Lessons for the demonstration's model that also teach it to use a solution in its prompt, as large models do."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from areal_grpo.demonstration.additions import problems, worked

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN_SHARE = 0.5
"""Share of the rows whose prompt begins with a solution, which the completion repeats."""
WORKED_SHARE, WORKED_LATER = 0.75, 0.15
"""Share of the rows, the first ones, that all show their working, and share of such rows among the others."""


class Lessons:
    """A `Dataset` of rows such as `{"prompt": "47+38=", "completion": "85"}`.

    In a half of them the prompt is `{7+8=15;4+3+1=8}85;47+38=`, and the completion repeats the solution.
    """

    def __init__(self, rows: int = 51200) -> None:
        draw, train = random.Random(0), problems("train")
        self._rows = []
        for row in range(rows):
            first, second = draw.choice(train)
            is_shown = draw.random() < SHOWN_SHARE
            share = 0.5 if is_shown else WORKED_LATER
            is_worked = (not is_shown and row < rows * WORKED_SHARE) or draw.random() < share
            completion = worked(first, second) if is_worked else str(first + second)
            prompt = f"{completion};{first}+{second}=" if is_shown else f"{first}+{second}="
            self._rows.append({"prompt": prompt, "completion": completion})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]
