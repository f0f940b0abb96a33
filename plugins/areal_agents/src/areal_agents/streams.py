"""Answers that are sent while they are generated."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformers.utils.chat_parsing import ResponseParser

from areal_agents.answers import ANCHOR, FORMS
from areal_agents.requests import RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.requests import AgentRequest
    from areal_agents.session import Session

REASONING: Final = "reasoning_content"
CONTENT: Final = "content"


class Piece(NamedTuple):
    """New text of an answer.

    Attributes:
        choice: number of the answer among those of the request, from 0.
        field: REASONING or CONTENT: the part of the message that the text continues.
        text: the new text; not empty.
    """

    choice: int
    field: str
    text: str


class AnswerStream:
    """The answers to one request: their texts as they are generated, and then the complete turns.

    An answer to a request for several, or for an answer that ends at a text, comes in one piece.

    Args:
        session: generates the answers.
        request: the request.
        prompt: its prompt.
        reader: parser of answers.
    """

    def __init__(self, session: Session, request: AgentRequest, prompt: Prompt, reader: AnswerReader) -> None:
        self.identifier = request.identifier
        self.prompt = prompt
        self.count = request.count
        self._texts = GrowingText(reader, prompt.ids, request.tools) if request.count == 1 else None
        self._pieces: deque[Piece] = deque()
        self._sent = {(choice, field): "" for choice in range(request.count) for field in (REASONING, CONTENT)}
        self._has_more = asyncio.Event()
        self.answering = session.start(request, prompt, None if self._texts is None else self._add)
        self.answering.add_done_callback(lambda _: self._has_more.set())

    async def begin(self) -> None:
        """Wait until there is something to send.

        Raises:
            RefusedError, RunError: the request failed before its first text.
        """
        await self._has_more.wait()
        if not self._pieces:
            await self.answering

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the texts of all answers. Those of an answer add up to the reasoning and the content of its message.

        Raises:
            RefusedError, RunError: the request failed.
        """
        while self._pieces or not self.answering.done():
            self._has_more.clear()
            while self._pieces:
                yield self._pieces.popleft()
            if not self.answering.done():
                await self._has_more.wait()
        for (choice, field), sent in self._sent.items():
            whole = self.turns[choice].answer.message.get(field) or ""
            if not whole.startswith(sent):
                raise RefusedError("the answer reads differently now that it is complete", 500, "internal_error")
            if len(whole) > len(sent):
                yield Piece(choice, field, whole[len(sent) :])

    @property
    def turns(self) -> list[Turn]:
        """The complete answers. They exist after the last piece."""
        return self.answering.result()

    def _add(self, ids: Sequence[int]) -> None:
        assert self._texts is not None
        for field, text in self._texts.add(ids):
            self._pieces.append(Piece(0, field, text))
            self._sent[0, field] += text
            self._has_more.set()


class GrowingText:
    """Reads an answer while its tokens arrive. Returns only text that no later token can change.

    That is the first reasoning and the text after it, up to the first tool call. Everything later is left to
    `AnswerReader.read`, and so are answers whose calls have no mark, and those that the tokenizer itself parses.

    Args:
        reader: parser of answers.
        prompt_ids: the prompt, which may have opened the reasoning.
        tools: tools that the agent offers.
    """

    def __init__(self, reader: AnswerReader, prompt_ids: Sequence[int], tools: Sequence[Any]) -> None:
        form = reader.form if tools else "none"
        self._reader = reader
        self._parser = ResponseParser(FORMS[form], prefix=ANCHOR + reader.begun(prompt_ids))
        self._fields = [] if form == "llama" or reader.has_own_template else [REASONING, CONTENT]
        self._has_begun = False  # whether the current field has text
        self._space = ""  # white space at the end of the current field: it counts only if text follows
        self._ids: list[int] = []  # the last decoded tokens, and those after them
        self._decoded = 0  # number of decoded tokens in `_ids`

    def add(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Return the new text as pairs of field and text."""
        if not self._fields:
            return []
        self._ids += ids
        found = []
        for event in self._parser.feed(self._new_text()):
            field = event["field"]
            if event["type"] == "region_chunk" and field in self._fields:
                text = self._space + event["text"]
                text = text if self._has_begun else text.lstrip()
                self._space = text[len(text.rstrip()) :]
                if text := text.rstrip():
                    found.append((field, text))
                    self._has_begun = True
                    del self._fields[: self._fields.index(field)]
            elif event["type"] == "region_close" and field in self._fields:
                if self._has_begun or field == REASONING:
                    self._fields.remove(field)
                self._has_begun, self._space = False, ""
            elif field not in (REASONING, CONTENT):
                self._fields = []
        return found

    def _new_text(self) -> str:
        """Decode the new tokens after the last decoded ones, on which their spelling depends.

        Tokens that may end the answer wait for a successor, and so does a part of a character.
        """
        count = len(self._reader.without_end(self._ids))
        before = self._reader.decode(self._ids[: self._decoded])
        text = self._reader.decode(self._ids[:count])
        if count <= self._decoded or text.endswith("\ufffd"):
            return ""
        self._ids, self._decoded = self._ids[self._decoded :], count - self._decoded
        return text[len(before) :]
