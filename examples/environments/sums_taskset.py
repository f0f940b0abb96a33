"""The sums as a taskset of verifiers. verifiers and areal both run it; areal does not import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sums
import verifiers.v1 as vf

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    """A sum, and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Rewards the answer."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Return the score of the reply."""
        return sums.score(trace.last_reply or "", self.data.answer)

    @vf.metric
    async def shows_working(self, trace: vf.Trace) -> float:
        """Return 1 if the reply begins with the working, in braces."""
        return float((trace.last_reply or "").startswith("{"))


class SumsTaskset(vf.Taskset[SumTask]):
    """4000 sums."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        for number in range(4000):
            question, answer = sums.task(number)
            yield SumTask(SumData(prompt=question, answer=answer), self.config.task)
