"""An episode as its agent sees it: a key, and answers to what it asks."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from areal_agents.conversations import Conversations
from areal_agents.requests import RefusedError
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.requests import AgentRequest
    from areal_core.data import Generation
    from areal_core.sdk import WorkflowContext

KEY_PREFIX = "sk-areal-"
LONG_TEXT = 20_000
"""Characters of messages whose tokens are there in milliseconds."""
LONGEST_NAME = 40
"""Characters of an option's name in a metric; trackers take letters, digits, and few others."""


class Session:
    """Of one episode.

    Args:
        context: generates.
        reader: reads answers.
        max_tokens: of a conversation, the answer included.
        most_answers: that an episode may ask for.
        template_arguments: see `Conversations`.

    Attributes:
        key: bearer token of the agent's.
        conversations: what was said.
        counts: of requests, answers, malformed calls and other sampling settings.
        generating_s: seconds in which at least one answer was generated.
        max_tokens: of a conversation.
    """

    def __init__(
        self,
        context: WorkflowContext,
        reader: AnswerReader,
        *,
        max_tokens: int,
        most_answers: int,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.conversations = Conversations(reader.tokenizer, template_arguments)
        self.counts: Counter[str] = Counter()
        self.generating_s = 0.0
        self._context = context
        self._reader = reader
        self.max_tokens = max_tokens
        self._most_answers = most_answers
        self._under_way = 0
        self._answering: set[asyncio.Task[list[Turn]]] = set()
        self._failure: RunError | None = None
        self._began = time.monotonic()

    async def find_place(self, request: AgentRequest) -> Prompt:
        """See `Conversations.place`; the tokens of a long text are looked for beside the event loop."""
        if not request.previous and len(f"{request.messages}{request.tools}") < LONG_TEXT:
            return self.conversations.place(request)
        return await asyncio.to_thread(self.conversations.place, request)

    async def place(self, request: AgentRequest) -> Prompt:
        """The tokens that the answers to a request continue.

        Raises:
            RefusedError: they cannot be continued; the agent is told why.
        """
        prompt = await self.find_place(request)
        if self.max_tokens <= prompt.length:
            message = f"the conversation has {prompt.length} tokens, and this run's conversations have at most"
            raise RefusedError(f"{message} {self.max_tokens}: workflow.max_tokens", code="context_length_exceeded")
        if self.counts["answers"] + request.count > self._most_answers:
            message = (
                f"the episode has asked for {self.counts['answers']} answers, asks for {request.count} more, and may"
            )
            raise RefusedError(f"{message} for {self._most_answers}: workflow.max_answers", 429, "too_many_answers")
        self.counts["answers"] += request.count
        if prompt.broken:
            self.counts[f"{prompt.broken}_prefixes"] += 1
        self.counts["other_sampling"] += bool(request.not_honored)
        names = (re.sub(r"[^\w.-]", "_", name[:LONGEST_NAME]) for name in request.not_honored)
        self.counts.update(f"other_sampling/{name}" for name in names)
        return prompt

    def start(self, request: AgentRequest, prompt: Prompt) -> asyncio.Task[list[Turn]]:
        """`answer` in a task, which ends with the session."""
        task = asyncio.ensure_future(self.answer(request, prompt))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return task

    def close(self) -> None:
        """The episode is over: nothing more is generated for it.

        Raises:
            RunError: the run cannot go on, whatever the agent made of the refusal that it was told.
        """
        for task in self._answering:
            task.cancel()
        if self._failure is not None:
            raise self._failure

    async def answer(self, request: AgentRequest, prompt: Prompt) -> list[Turn]:
        """Generate what was asked for. Whoever cannot deliver it says so to `lose`."""
        ids = prompt.ids
        room = self.max_tokens - len(ids)
        longest = room if request.max_tokens is None else min(room, request.max_tokens)
        settings = {"max_new_tokens": longest, "stop": request.stop}
        generating = [asyncio.ensure_future(self._generate(ids, **settings)) for _ in range(request.count)]
        self._begin()
        try:
            generations = await asyncio.gather(*generating)
        finally:
            self._end()
            for task in generating:  # where one has failed
                task.cancel()
        begun = self._reader.begun(ids)
        turns = []
        for generation in generations:
            calls = self.counts["calls"]
            answer = self._reader.read(generation, begun, request.tools, request.stop, first_call=calls)
            self.counts["malformed_calls"] += answer.malformed
            self.counts["calls"] += len(answer.calls)
            turns.append(self.conversations.add(prompt, generation, answer, request.model))
        return turns

    async def _generate(self, ids: list[int], **settings: Any) -> Generation:
        try:
            return await self._context.generate(ids, **settings)
        except RunError as error:
            self._failure = self._failure or error
            raise
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def lose(self, turns: Sequence[Turn]) -> None:
        """These answers did not arrive; they are not trained on."""
        self.conversations.discard(turns)

    def _begin(self) -> None:
        if not self._under_way:
            self._began = time.monotonic()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.generating_s += time.monotonic() - self._began
