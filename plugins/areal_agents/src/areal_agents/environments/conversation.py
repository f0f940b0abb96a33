"""A conversation between the policy and what answers it: tools, a shell or an environment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from areal_agents.answers import AnswerReader
from areal_agents.requests import AgentRequest, RefusedError
from areal_agents.session import Session
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import Any

    from areal_agents.config import ConversationSettings
    from areal_agents.conversations import Turn
    from areal_core.chat import Message
    from areal_core.sdk import WorkflowContext


class Sessions:
    """Opens the session of each episode of a workflow. The first one makes the reader of answers.

    Args:
        settings: of the workflow.
        most_answers: maximum number of answers of an episode.
    """

    def __init__(self, settings: ConversationSettings, most_answers: int) -> None:
        self._settings = settings
        self._most_answers = most_answers
        self._reader: AnswerReader | None = None

    def open(self, context: WorkflowContext) -> Session:
        """Return the session of an episode."""
        settings = self._settings
        if self._reader is None:
            self._reader = AnswerReader(context.tokenizer, settings.tool_form, settings.chat_template)
        return Session(context, self._reader, max_tokens=settings.max_tokens, most_answers=self._most_answers)


def opening_messages(system: str | None, text: str) -> list[Message]:
    """Return the first messages of a conversation: the system message if there is one, and the user's."""
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system else [user]


async def converse(
    session: Session,
    opening: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    respond: Callable[[Turn], Awaitable[Sequence[Message]]],
) -> None:
    """Let the policy answer until there is no response, or the conversation is full.

    Args:
        session: session of the episode.
        opening: first messages.
        tools: schemas of the tools that the policy may call.
        arguments: arguments of the chat template.
        respond: returns the messages that follow an answer; an empty list ends the conversation.

    Raises:
        RefusedError: the first messages leave no room for an answer, or the chat template rejects the messages.
    """
    messages = opening
    while True:
        request = AgentRequest(messages, tools, arguments)
        try:
            (turn,) = await session.answer(request, await session.place(request))
        except RefusedError as error:
            if error.code != "context_length_exceeded" or not session.conversations.turns:
                raise
            mark_cut(session)  # the conversation has reached max_tokens
            return
        following = await respond(turn)
        if not following:
            return
        messages = [*turn.messages, *following]


async def call_tools(turn: Turn, call: Callable[[Mapping[str, Any]], Awaitable[str]]) -> list[Message]:
    """Return the messages with the results of an answer's tool calls, which run concurrently.

    Args:
        turn: the answer.
        call: returns the result of one call, as text.
    """
    results = await asyncio.gather(*(call(each) for each in turn.answer.calls))
    messages: list[Message] = [
        {"role": "tool", "name": each["function"]["name"], "tool_call_id": each["id"], "content": result}
        for each, result in zip(turn.answer.calls, results, strict=True)
    ]
    if turn.answer.malformed:
        # A message of the role `tool` would need the id of the call.
        messages.append({"role": "user", "content": "error: a call of a tool could not be read; write it as described"})
    return messages


def cut_result(text: str, longest: int) -> str:
    """Return a tool's result, cut off after `longest` characters."""
    return text if len(text) <= longest else text[:longest] + " ... (cut)"


def mark_cut(session: Session) -> None:
    """Mark the last answer as cut off, because a limit of the workflow ended the conversation."""
    session.conversations.turns[-1].generation.finish_reason = FinishReason.LENGTH
