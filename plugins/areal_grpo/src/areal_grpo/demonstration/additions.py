"""Two-digit additions, answered directly (`85`) or with working (`{7+8=15;4+3+1=8}85`)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_grpo.demonstration.settings import AdditionLessonsSettings, SplitSettings

HELD_OUT = 200
_SPLIT_SEED = 20240


def worked(first: int, second: int) -> str:
    """Return the working of an addition, units before tens, and its result."""
    units = first % 10 + second % 10
    carry = units // 10
    carried = f"+{carry}" if carry else ""
    tens = first // 10 + second // 10 + carry
    return f"{{{first % 10}+{second % 10}={units};{first // 10}+{second // 10}{carried}={tens}}}{first + second}"


def problems(split: str) -> list[tuple[int, int]]:
    """Return the additions of a split: 200 are held out, the other 7,900 are for training."""
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(_SPLIT_SEED).shuffle(pairs)
    return pairs[:HELD_OUT] if split == "held_out" else pairs[HELD_OUT:]


class Additions:
    """A `Dataset` of rows `{"prompt": "47+38=", "answer": "85"}`.

    Args:
        settings: the split.
    """

    def __init__(self, settings: SplitSettings) -> None:
        self._problems = problems(settings.split)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, second = self._problems[index]
        return {"prompt": f"{first}+{second}=", "answer": str(first + second)}


class AdditionLessons:
    """A `Dataset` of rows with a `completion`, for fine-tuning: first answers with working, then mostly direct ones.

    The first part teaches the procedure. The second makes direct answers the habit, so that reinforcement learning has
    to discover that working pays off.

    Args:
        settings: number of rows, and share of answers with working.
    """

    def __init__(self, settings: AdditionLessonsSettings) -> None:
        generator, train, rows = random.Random(settings.seed), problems("train"), settings.rows
        self._rows = []
        for row in range(rows):
            first, second = generator.choice(train)
            is_worked = row < rows * settings.worked_share or generator.random() < settings.worked_later
            completion = worked(first, second) if is_worked else str(first + second)
            self._rows.append({"prompt": f"{first}+{second}=", "completion": completion})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]


def right_result(completion: str, answer: str, finish_reason: str) -> float:
    """Return 1 if the text after the last `}` is the answer and the model ended it itself, else 0."""
    return float(finish_reason == "stop" and completion.rsplit("}", 1)[-1].strip() == answer)


def shows_working(completion: str) -> float:
    """Return 1 if the answer has a working, else 0. With weight 0 it is only logged."""
    return float("}" in completion)
