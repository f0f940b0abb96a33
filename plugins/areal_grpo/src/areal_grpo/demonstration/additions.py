"""Two-digit additions, answered directly (`85`) or worked (`{7+8=15;4+3+1=8}85`)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        split: train or held_out; they share no problem.
    """

    def __init__(self, split: str = "train") -> None:
        self._problems = problems(split)

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
        rows: how many.
        worked_share: share of the rows, from the first, that are all worked.
        worked_later: share of worked answers among the others.
        seed: of the choice.
    """

    def __init__(
        self, rows: int = 25600, worked_share: float = 0.75, worked_later: float = 0.15, seed: int = 0
    ) -> None:
        choice, train = random.Random(seed), problems("train")
        self._rows = []
        for row in range(rows):
            first, second = choice.choice(train)
            is_worked = row < rows * worked_share or choice.random() < worked_later
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
