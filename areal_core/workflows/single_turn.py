"""One prompt, one answer, one score: the workflow of verifiable rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data.trajectory import Episode, Trajectory
from areal_core.workflows.prompts import encode_prompt

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
        input_ids, prompt = encode_prompt(context.tokenizer, row, self._settings)
        generation = await context.generate(input_ids)
        completion = context.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        score = await context.score(
            prompt=prompt,
            completion=completion,
            completion_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
        )
        trajectory = Trajectory.from_generation(input_ids, generation)
        return Episode([trajectory], score.value, dict(score.components), text=f"{prompt}{completion}")
