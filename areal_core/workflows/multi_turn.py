"""Several turns with an environment. Tokens are only appended: what the policy wrote is never tokenized anew."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.data.trajectory import Episode, FinishReason, TrajectoryBuilder
from areal_core.interfaces.workflow import RowError
from areal_core.workflows.prompts import apply_template, between_turns, prompt_messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.workflow import WorkflowContext
    from areal_core.workflows.settings import MultiTurnSettings


class MultiTurn:
    """The policy and an environment take turns; the environment's rewards add up, discounted by turn.

    The conversation is one trajectory, and what each turn has earned is its turn key `turn_rewards`, for advantages
    that tell turns apart. Between two turns of the policy stand the tokens that the chat template writes around the
    environment's answer, taken as the difference of two renderings; the policy's own tokens stay as they were sampled.
    """

    def __init__(self, settings: MultiTurnSettings) -> None:
        self._settings, self._make_environment = settings, settings.environment.prepare()

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        settings = self._settings
        environment = self._make_environment()
        async with AsyncExitStack() as stack:
            if hasattr(environment, "close"):
                stack.push_async_callback(environment.close)
            opening = await environment.reset(row)
            messages: list[dict[str, str]] = [dict(each) for each in opening] or prompt_messages(row, settings) or []
            builder = TrajectoryBuilder()
            input_ids, text = apply_template(context.tokenizer, messages)
            builder.add_context(input_ids)
            rewards: list[float] = []
            for number in range(settings.max_turns):
                room = settings.max_tokens - len(builder)
                if room <= 0:
                    many = f"the opening has {len(builder)} tokens"
                    raise RowError(f"{many}, and workflow.max_tokens is {settings.max_tokens}")
                generation = await context.generate(builder.input_ids, max_new_tokens=room)
                builder.add_generation(generation)
                completion = context.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
                answer, turn_reward = await environment.step(completion)
                rewards.append(settings.turn_discount**number * turn_reward)
                text += completion
                if answer is None or generation.finish_reason is FinishReason.ABORT:
                    break
                if number + 1 == settings.max_turns:
                    builder.cut()
                    break
                turn = {"role": "assistant", "content": completion}
                following = [{"role": "user", "content": answer}]
                between, words = between_turns(context.tokenizer, messages, turn, following, generation.output_ids)
                if len(builder) + len(between) >= settings.max_tokens:
                    builder.cut()
                    break
                builder.add_context(between)
                text += words
                messages += [turn, *following]
            turns = {"turn_rewards": np.array(rewards, np.float32)}
            return Episode([builder.build(turns=turns)], sum(rewards), text=text)
