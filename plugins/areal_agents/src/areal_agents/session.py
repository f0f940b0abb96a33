"""Session of an episode: a key, and answers to the agent's requests."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

from areal_agents.conversations import Conversations
from areal_agents.requests import RefusedError
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.requests import AgentRequest
    from areal_core.data import Generation
    from areal_core.sdk import WorkflowContext

KEY_PREFIX = "sk-areal-"
LONG_TEXT = 20_000
"""Characters of messages that are tokenized on the event loop (milliseconds). Longer ones are tokenized in a thread."""
LONGEST_NAME = 40
"""Characters of an option's name in a metric. Other characters than letters, digits, _ . - are replaced."""


class Session:
    """Answers the requests of one episode's agent.

    Args:
        context: generates the answers.
        reader: parser of answers.
        max_tokens: maximum tokens of a conversation, answers included.
        most_answers: maximum number of answers that the episode may request.
        template_arguments: the run's arguments of the chat template.

    Attributes:
        key: bearer token of the episode.
        conversations: the answers so far, as trees.
        counts: numbers of requests, answers, calls, malformed calls and options that are not honored.
        generating_s: seconds during which at least one answer was being generated.
        max_tokens: maximum tokens of a conversation.
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
        self._active_answers = 0
        self._answering: set[asyncio.Task[list[Turn]]] = set()
        self._failure: RunError | None = None
        self._began = time.monotonic()

    async def find_place(self, request: AgentRequest) -> Prompt:
        """Return the prompt for a request without counting it; see `Conversations.place`."""
        if not request.previous and len(f"{request.messages}{request.tools}") < LONG_TEXT:
            return self.conversations.place(request)
        return await asyncio.to_thread(self.conversations.place, request)

    async def place(self, request: AgentRequest) -> Prompt:
        """Return the prompt for a request, and count the request.

        Raises:
            RefusedError: the chat template rejects the messages, or a limit of the episode is reached.
        """
        prompt = await self.find_place(request)
        if self.max_tokens <= prompt.length:
            raise RefusedError(
                f"the conversation has {prompt.length} tokens; the limit is {self.max_tokens} (workflow.max_tokens)",
                code="context_length_exceeded",
            )
        if self.counts["answers"] + request.count > self._most_answers:
            raise RefusedError(
                f"the episode has asked for {self.counts['answers']} answers and asks for {request.count} more; "
                f"the limit is {self._most_answers} (workflow.max_answers)",
                429,
                "too_many_answers",
            )
        self.counts["answers"] += request.count
        if prompt.broken:
            self.counts[f"{prompt.broken}_prefixes"] += 1
        self.counts["other_sampling"] += bool(request.not_honored)
        names = (re.sub(r"[^\w.-]", "_", name[:LONGEST_NAME]) for name in request.not_honored)
        self.counts.update(f"other_sampling/{name}" for name in names)
        return prompt

    def start(
        self, request: AgentRequest, prompt: Prompt, on_tokens: Callable[[Sequence[int]], None] | None = None
    ) -> asyncio.Task[list[Turn]]:
        """Run `answer` in a task that `close` cancels."""
        task = asyncio.ensure_future(self.answer(request, prompt, on_tokens))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return task

    def close(self) -> None:
        """Cancel all generation for this episode.

        Raises:
            RunError: generation failed because the run cannot continue. The agent may have swallowed the error that it
                got.
        """
        for task in self._answering:
            task.cancel()
        if self._failure is not None:
            raise self._failure

    async def answer(
        self, request: AgentRequest, prompt: Prompt, on_tokens: Callable[[Sequence[int]], None] | None = None
    ) -> list[Turn]:
        """Generate the answers to a request. Call `lose` if they cannot be delivered.

        Args:
            request: the request.
            prompt: its prompt.
            on_tokens: called with the tokens of the only answer as they arrive; see `GenerationRequest.on_tokens`.
        """
        ids = prompt.ids
        max_output = self.max_tokens - len(ids)
        max_new_tokens = max_output if request.max_tokens is None else min(max_output, request.max_tokens)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": request.stop}
        if on_tokens is not None:
            settings["on_tokens"] = on_tokens
        generating = [asyncio.ensure_future(self._generate(ids, **settings)) for _ in range(request.count)]
        self._begin()
        try:
            generations = await asyncio.gather(*generating)
        finally:
            self._end()
            for task in generating:  # if one has failed, the others are not needed
                task.cancel()
        begun = self._reader.begun(ids)
        turns = []
        for number, generation in enumerate(generations):
            identifier = uuid.uuid4().hex if number else request.identifier
            calls = self.counts["calls"]
            answer = self._reader.read(generation, begun, request.tools, request.stop, first_call=calls)
            self.counts["malformed_calls"] += answer.malformed
            self.counts["calls"] += len(answer.calls)
            turns.append(self.conversations.add(prompt, generation, answer, request.agent_id, identifier))
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
        """Discard answers that did not reach the agent, so that they are not trained on."""
        self.counts["lost_answers"] += self.conversations.discard(turns)

    def _begin(self) -> None:
        if not self._active_answers:
            self._began = time.monotonic()
        self._active_answers += 1

    def _end(self) -> None:
        self._active_answers -= 1
        if not self._active_answers:
            self.generating_s += time.monotonic() - self._began
