"""What AReaL's GSM8K examples are made of, as parts of areal: a reward, an episode of one turn, one of several turns.

docs/guides/from-areal.md explains each beside its counterpart. With a config by `areal convert areal CONFIG.yaml`:

    areal run my.yaml "rewards=[from_areal.py:last_number]" workflow=from_areal.py:OneTurn
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from areal_core.chat import apply_template, between_turns
from areal_core.data import Episode, TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data import Generation
    from areal_core.sdk import RewardScore, WorkflowContext


def last_number(completion: str, answer: str) -> float:
    """1 if the boxed number, or else the last one, is the answer; simpler than AReaL's `gsm8k_reward_fn`."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    said, wanted = (
        re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (boxed[-1] if boxed else completion, answer)
    )
    return float(bool(said and wanted) and float(said[-1]) == float(wanted[-1]))


class OneTurn:
    """One answer to one prompt, as `workflow: single_turn` has it already; AReaL's `RLVRWorkflow`."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Play it once; areal repeats it `rollout.group_size` times."""
        builder = TrajectoryBuilder()
        ids, said = _asked([{"role": "user", "content": row["prompt"]}], (), context)
        builder.add_context(ids)
        answer = await context.generate(builder.input_ids)
        builder.add_generation(answer)
        score, text = await _scored(row, answer, context)
        return Episode([builder.build()], score.value, dict(score.components), f"{said}{text}")


class TryAgain:
    """Asks again behind a wrong answer, for a discounted reward; AReaL's `MultiTurnWorkflow`."""

    def __init__(self, max_turns: int = 2, turn_discount: float = 0.9, message: str = " wrong, again: ") -> None:
        self._max_turns, self._discount, self._message = max_turns, turn_discount, message

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """One trajectory, of whose tokens only the model's own are learned."""
        builder, discount, told = TrajectoryBuilder(), 1.0, ""
        output_ids: Sequence[int] = ()
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(self._max_turns):
            ids, said = _asked(messages, output_ids, context)
            builder.add_context(ids)
            answer = await context.generate(builder.input_ids)
            builder.add_generation(answer)
            score, text = await _scored(row, answer, context)
            told, output_ids = f"{told}{said}{text}", answer.output_ids
            if score.value > 0:
                break
            discount *= self._discount
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{self._message}{row['prompt']}"},
            ]
        return Episode([builder.build()], score.value * discount, dict(score.components), told)


def _asked(
    messages: Sequence[Mapping[str, str]], output_ids: Sequence[int], context: WorkflowContext
) -> tuple[list[int], str]:
    """The tokens and the text of the last message, the user's, behind the others: by the chat template if there is one.

    A template ends the model's turn before, of the tokens `output_ids`, where the model has not.
    """
    *before, last = messages
    if context.tokenizer.chat_template is None:
        return list(context.tokenizer.encode(last["content"], add_special_tokens=False)), last["content"]
    if not before:
        return apply_template(context.tokenizer, [last])
    return between_turns(context.tokenizer, before[:-1], before[-1], [last], output_ids)


async def _scored(row: Mapping[str, Any], answer: Generation, context: WorkflowContext) -> tuple[RewardScore, str]:
    text = context.tokenizer.decode(answer.output_ids, skip_special_tokens=True)
    score = await context.score(
        prompt=row["prompt"], completion=text, completion_ids=answer.output_ids, finish_reason=answer.finish_reason
    )
    return score, text
