"""A taskset of verifiers: sums of two numbers. verifiers and areal both run it; areal does not import it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import verifiers.v1 as vf

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    """A sum, and its result."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Rewards the result behind the working."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if the text behind the working is the result."""
        return float((trace.last_reply or "").rpartition("}")[2].strip() == self.data.answer)

    @vf.metric
    async def shows_working(self, trace: vf.Trace) -> float:
        """Return 1 if the reply begins with the working, in braces."""
        return float((trace.last_reply or "").startswith("{"))


class SumsTaskset(vf.Taskset[SumTask]):
    """Sums of two numbers of two digits, always the same ones."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        generator = random.Random(0)
        for _ in range(4000):
            first, second = generator.randrange(10, 100), generator.randrange(10, 100)
            data = SumData(prompt=f"{first}+{second}=", answer=str(first + second))
            yield SumTask(data, self.config.task)
