"""A workflow: how a row of the data set becomes an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from areal_core.data import Episode, TrajectoryBuilder
from areal_core.plugins import register
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.sdk import WorkflowContext


@register("workflows")
class SelfCheck:
    """The model answers, is asked whether that is right, and answers again. One object plays all episodes."""

    def __init__(
        self,
        question: Annotated[str, Field(description="Question that follows the first answer.")] = " Is that right? ",
    ) -> None:
        self._question = question

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """One trajectory: both answers are learned from, the question is not."""
        tokenizer, builder = context.tokenizer, TrajectoryBuilder()
        builder.add_context(tokenizer.encode(row["prompt"], add_special_tokens=False))
        builder.add_generation(await context.generate(builder.input_ids))
        builder.add_context(tokenizer.encode(self._question, add_special_tokens=False))
        second = await context.generate(builder.input_ids)
        builder.add_generation(second)
        completion = tokenizer.decode(second.output_ids, skip_special_tokens=True)
        score = await context.score(
            prompt=row["prompt"],
            completion=completion,
            completion_ids=second.output_ids,
            finish_reason=second.finish_reason,
        )
        text = tokenizer.decode(builder.input_ids, skip_special_tokens=True)
        return Episode([builder.build()], score.value, dict(score.components), text)
