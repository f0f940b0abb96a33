"""Several turns with an environment. Tokens are only appended: what the policy wrote is never tokenized again."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.chat.answers import answer_text, template_opening
from areal_core.chat.messages import read_conversation
from areal_core.chat.rows import conversation_of, prompt_of
from areal_core.chat.template import Conversation, RewrittenPrefixError, between_turns, encode, render_conversation
from areal_core.data.trajectory import Episode, FinishReason, Trajectory, TrajectoryBuilder
from areal_core.interfaces.workflow import RowError, read_step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from areal_core.chat.messages import Message
    from areal_core.interfaces.workflow import Environment, WorkflowContext
    from areal_core.workflows.settings import MultiTurnSettings


class MultiTurn:
    """The policy and an environment alternate. The environment's rewards add up, discounted by turn.

    The conversation is one trajectory. `turn_rewards` holds one reward per turn, for per-turn advantages. Between two
    turns of the policy are the tokens that the chat template writes around the environment's answer, taken as the
    difference of two renderings; the policy's own tokens stay as they were sampled.

    Some templates write earlier turns differently once others follow: reasoning models drop old thoughts. Then a new
    trajectory of the same episode begins, with the conversation as the template writes it now.
    """

    def __init__(self, settings: MultiTurnSettings) -> None:
        self._settings, self._make_environment = settings, settings.environment.prepare()

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Run one episode; see `RolloutWorkflow.run_episode`."""
        environment = self._make_environment()
        async with AsyncExitStack() as stack:
            if hasattr(environment, "close"):
                stack.push_async_callback(environment.close)
            opening = await _coroutine(environment, "reset", row)
            return await self._play(environment, self._opened(row, opening), context)

    def _opened(self, row: Mapping[str, Any], opening: Any) -> Conversation:
        """Return the conversation that the environment opens; the row's prompt where it opens none.

        Raises:
            RowError: neither is a conversation.
        """
        if opening:
            return conversation_of(row, read_conversation(opening, "the environment's reset()"), self._settings)
        settings = self._settings.model_copy(update={"chat_template": "always"})
        asked = prompt_of(row, settings)
        assert isinstance(asked, Conversation)
        return asked

    async def _play(self, environment: Environment, asked: Conversation, context: WorkflowContext) -> Episode:
        settings, tokenizer = self._settings, context.tokenizer
        arguments = asked.template_arguments
        messages = list(asked.messages)
        written = render_conversation(tokenizer, asked, add_generation_prompt=True)
        input_ids, opening = encode(tokenizer, written)
        text = opening
        opened = template_opening(tokenizer, asked, written)
        builder = TrajectoryBuilder()
        builder.add_context(input_ids)
        finished: list[Trajectory] = []
        total, rewards, metrics = 0.0, list[float](), Counter[str]()
        for number in range(settings.max_turns):
            room = settings.max_tokens - len(builder)
            if room <= 0:
                many = f"the opening has {len(builder)} tokens"
                raise RowError(f"{many}, and workflow.max_tokens is {settings.max_tokens}")
            generation = await context.generate(builder.input_ids, max_new_tokens=room)
            builder.add_generation(generation)
            completion = answer_text(tokenizer, generation.output_ids, context.end_ids, opened)
            result = read_step(environment, await _coroutine(environment, "step", completion))
            rewards.append(settings.turn_discount**number * result.reward)
            total += rewards[-1]
            metrics.update(result.info)
            text += completion.removeprefix(opened)
            if result.terminated or generation.finish_reason is FinishReason.ABORT:
                break
            if result.truncated or number + 1 == settings.max_turns:
                builder.cut()
                break
            turn = {"role": "assistant", "content": completion}
            following = _as_messages(result.observation)
            conversation = asked.with_messages([*messages, turn, *following])
            written = render_conversation(tokenizer, conversation, add_generation_prompt=True)
            try:
                added, between = between_turns(tokenizer, messages, turn, following, generation.output_ids, **arguments)
                is_full = len(builder) + len(added) >= settings.max_tokens
            except RewrittenPrefixError:
                added, between = encode(tokenizer, written)
                is_full = len(added) >= settings.max_tokens
                if not is_full:
                    finished.append(_built(builder, rewards))
                    builder, rewards = TrajectoryBuilder(), []
                between = f"\n[the chat template rewrites earlier turns: a new trajectory begins]\n{between}"
            if is_full:
                builder.cut()
                break
            builder.add_context(added)
            text += between
            messages += [turn, *following]
            opened = template_opening(tokenizer, conversation, written)
        trajectories = [*finished, _built(builder, rewards)]
        return Episode(trajectories, total, text=text, metrics=dict(metrics), prompt=opening)


def _coroutine(environment: Environment, name: str, argument: object) -> Awaitable[Any]:
    """Call a method of an environment, and return what must be awaited.

    Raises:
        TypeError: it returned something else.
    """
    returned: Any = getattr(environment, name)(argument)
    if not isawaitable(returned):
        raise TypeError(f"{type(environment).__name__}.{name} is no coroutine: write async def {name}")
    return returned


def _as_messages(observation: str | Sequence[Mapping[str, Any]] | None) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return read_conversation(observation, "the environment's observation")


def _built(builder: TrajectoryBuilder, rewards: list[float]) -> Trajectory:
    return builder.build(turns={"turn_rewards": np.array(rewards, np.float32)})
