"""An episode as its agent sees it: a key, and answers to what it asks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING

from areal_agents.conversations import Conversations
from areal_agents.requests import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.requests import AgentRequest
    from areal_core.interfaces import WorkflowContext

KEY_PREFIX = "sk-areal-"


class Session:
    """Of one episode.

    Args:
        context: generates.
        reader: reads answers.
        max_tokens: of a conversation, the answer included.
        most_answers: that an episode may ask for.

    Attributes:
        key: bearer token of the agent's.
        conversations: what was said.
        counts: of requests, answers, malformed calls and other sampling settings.
        generating_s: seconds in which at least one answer was generated.
        max_tokens: of a conversation.
    """

    def __init__(self, context: WorkflowContext, reader: AnswerReader, *, max_tokens: int, most_answers: int) -> None:
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.conversations = Conversations(reader.tokenizer)
        self.counts: Counter[str] = Counter()
        self.generating_s = 0.0
        self._context = context
        self._reader = reader
        self.max_tokens = max_tokens
        self._most_answers = most_answers
        self._under_way = 0
        self._began = time.monotonic()

    def place(self, request: AgentRequest) -> Prompt:
        """The tokens that the answers to a request continue.

        Raises:
            RefusedError: they cannot be continued; the agent is told why.
        """
        prompt = self.conversations.place(request)
        if self.max_tokens <= len(prompt.ids):
            raise RefusedError(
                f"the conversation has {len(prompt.ids)} tokens, and this run's conversations have at most "
                f"{self.max_tokens}: workflow.max_tokens",
                code="context_length_exceeded",
            )
        if self.counts["answers"] + request.count > self._most_answers:
            raise RefusedError(
                f"the episode has asked for {self.counts['answers']} answers, and may for {self._most_answers}: "
                "workflow.max_answers",
                429,
                "too_many_answers",
            )
        self.counts["answers"] += request.count
        if prompt.broken:
            self.counts[f"{prompt.broken}_prefixes"] += 1
        self.counts["other_sampling"] += bool(request.other_sampling)
        return prompt

    async def answer(self, request: AgentRequest, prompt: Prompt) -> list[Turn]:
        """Generate what was asked for. Whoever cannot deliver it says so to `lose`."""
        ids = prompt.ids
        room = self.max_tokens - len(ids)
        longest = room if request.max_tokens is None else min(room, request.max_tokens)
        self._begin()
        try:
            generations = await asyncio.gather(
                *(self._context.generate(ids, max_new_tokens=longest, stop=request.stop) for _ in range(request.count))
            )
        except ValueError as error:
            raise RefusedError(str(error)) from error
        finally:
            self._end()
        begun = self._reader.begun(ids)
        turns = []
        for generation in generations:
            answer = self._reader.read(generation, begun, request.tools, request.stop)
            self.counts["malformed_calls"] += answer.malformed
            self.counts["calls"] += len(answer.calls)
            turns.append(self.conversations.add(prompt, generation, answer))
        return turns

    def lose(self, turns: Sequence[Turn]) -> None:
        """These answers did not arrive; they are not trained on."""
        self.counts["lost_answers"] += len(turns)
        self.conversations.discard(turns)

    def _begin(self) -> None:
        if not self._under_way:
            self._began = time.monotonic()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.generating_s += time.monotonic() - self._began
