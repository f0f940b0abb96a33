"""Two-digit additions, answered directly (`85`) or worked (`{7+8=15;4+3+1=8}85`)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_grpo.demonstration.settings import AdditionLessonsSettings, SplitSettings

HELD_OUT = 200
_SPLIT_SEED = 20240


def worked(first: int, second: int) -> str:
    """The working of an addition, units before tens, and its result."""
    units = first % 10 + second % 10
    carry = units // 10
    carried = f"+{carry}" if carry else ""
    tens = first // 10 + second // 10 + carry
    return f"{{{first % 10}+{second % 10}={units};{first // 10}+{second // 10}{carried}={tens}}}{first + second}"


def problems(split: str) -> list[tuple[int, int]]:
    """All additions of two-digit numbers: 200 held out, the other 7,900 for training."""
    everything = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(_SPLIT_SEED).shuffle(everything)
    return everything[:HELD_OUT] if split == "held_out" else everything[HELD_OUT:]


class Additions:
    """Rows `{"prompt": "47+38=", "answer": "85"}`.

    Args:
        settings: which split.
    """

    def __init__(self, settings: SplitSettings) -> None:
        self._problems = problems(settings.split)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, second = self._problems[index]
        return {"prompt": f"{first}+{second}=", "answer": str(first + second)}


class AdditionLessons:
    """Rows with a `completion`, for fine-tuning: first only worked answers, then mostly direct ones.

    The first part teaches the procedure. The second makes answering directly the habit, which leaves it to
    reinforcement learning to find out that working pays.

    Args:
        settings: how many rows, and how they are answered.
    """

    def __init__(self, settings: AdditionLessonsSettings) -> None:
        choice, train, rows = random.Random(settings.seed), problems("train"), settings.rows
        self._rows = []
        for row in range(rows):
            first, second = choice.choice(train)
            is_worked = row < rows * settings.worked_share or choice.random() < settings.worked_later
            completion = worked(first, second) if is_worked else str(first + second)
            self._rows.append({"prompt": f"{first}+{second}=", "completion": completion})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]


def right_result(completion: str, answer: str, finish_reason: str) -> float:
    """1 if what follows the last `}` is the answer and the model ended by itself, else 0."""
    return float(finish_reason == "stop" and completion.rsplit("}", 1)[-1].strip() == answer)


def shows_working(completion: str) -> float:
    """1 if the answer has a working; given weight 0, it is only watched."""
    return float("}" in completion)
