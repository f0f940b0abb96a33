"""Several turns with an environment. Tokens are only appended: what the policy wrote is never tokenised anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data.trajectory import Episode, FinishReason, TrajectoryBuilder
from areal_core.workflows.prompts import apply_template, prompt_messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.workflow import WorkflowContext
    from areal_core.workflows.settings import MultiTurnSettings


class MultiTurn:
    """The policy and an environment take turns; the environment's rewards add up, discounted by turn.

    The conversation is one trajectory. Between two turns of the policy stand the tokens that the chat template writes
    around the environment's answer, taken as the difference of two renderings; the policy's own tokens stay as they
    were sampled.
    """

    def __init__(self, settings: MultiTurnSettings) -> None:
        self._settings = settings

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        settings = self._settings
        environment = settings.environment.build()
        opening = await environment.reset(row)
        messages: list[dict[str, str]] = [dict(message) for message in opening] or prompt_messages(row, settings) or []
        builder = TrajectoryBuilder()
        input_ids, text = apply_template(context.tokenizer, messages)
        builder.add_context(input_ids)
        reward = 0.0
        for turn in range(settings.max_turns):
            room = settings.max_tokens - len(builder.input_ids)
            if room <= 0:
                break
            generation = await context.generate(builder.input_ids, max_new_tokens=room)
            builder.add_generation(generation)
            completion = context.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
            answer, turn_reward = await environment.step(completion)
            reward += settings.turn_discount**turn * turn_reward
            text += completion
            # A turn that was cut off has no end-of-turn token, so nothing may be appended behind it.
            is_cut = generation.finish_reason is not FinishReason.STOP
            if answer is None or is_cut or turn + 1 == settings.max_turns:
                break
            between, between_text = _between_turns(context.tokenizer, messages, completion, answer)
            builder.add_context(between)
            text += between_text
            messages += [{"role": "assistant", "content": completion}, {"role": "user", "content": answer}]
        return Episode([builder.build()], reward, text=text)


def _between_turns(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], completion: str, answer: str
) -> tuple[list[int], str]:
    """What the template puts between the end of the policy's turn and the start of its next one."""
    assistant = {"role": "assistant", "content": completion}
    before = tokenizer.apply_chat_template([*messages, assistant], tokenize=False)
    _, after = apply_template(tokenizer, [*messages, assistant, {"role": "user", "content": answer}])
    # The policy's turn may have ended with the end-of-turn token; the template's own copy of it is left out.
    head = before.rstrip("\n")
    if not after.startswith(head):
        raise ValueError(
            "the chat template rewrites earlier turns, so tokens cannot be appended; use a workflow that starts a new "
            "trajectory for each turn"
        )
    text = after[len(head) :]
    return list(tokenizer.encode(text, add_special_tokens=False)), text
