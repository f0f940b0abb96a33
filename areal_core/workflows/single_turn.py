"""One prompt, one answer, one score: the workflow of verifiable rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.chat.answers import answer_text
from areal_core.chat.rows import read_prompt
from areal_core.data.trajectory import Episode, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.workflow import WorkflowContext
    from areal_core.workflows.settings import SingleTurnSettings


class SingleTurn:
    """Generates one answer to the row's prompt and scores it with the run's rewards."""

    def __init__(self, settings: SingleTurnSettings) -> None:
        self._settings = settings

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        prompt = read_prompt(context.tokenizer, row, self._settings)
        self._settings.check_length(prompt, context.tokenizer)
        generation = await context.generate(prompt.input_ids)
        completion = answer_text(context.tokenizer, generation.output_ids, context.end_ids, prompt.opened)
        score = await context.score(
            prompt=prompt.question,
            completion=completion,
            completion_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
            prompt_ids=prompt.input_ids,
        )
        trajectory = Trajectory.from_generation(prompt.input_ids, generation)
        text = f"{prompt.question}{completion}"
        return Episode([trajectory], score.value, dict(score.components), text=text, prompt=prompt.question)
