"""The conversations of an episode, as a tree of answers that keeps the exact tokens of each.

A request whose messages continue an earlier answer continues its **token ids**: what the policy has written is never
tokenized again, and what others add is the difference of two renderings of the chat template. A template that writes
earlier turns anew, and a conversation that could continue either of two answers, begin a new tree, and are counted.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_agents.requests import RefusedError
from areal_core.chat import Conversation, RewrittenPrefixError, apply_template, between_turns
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from areal_agents.answers import Answer
    from areal_agents.requests import AgentRequest
    from areal_core.chat import Message
    from areal_core.data import Generation


@dataclass(eq=False, slots=True)
class Prompt:
    """What an answer continues.

    Attributes:
        parent: the answer before it in the same tree; None for the first one.
        context_ids: tokens between the end of `parent` and the answer; the whole prompt for a first one.
        messages: the conversation so far; an answer of the policy's as it was sampled, not as it came back.
        key: stands for the conversation so far.
        broken: why it begins a tree although it continues an answer: "rewritten" by the template, or "ambiguous";
            empty where it does not.
    """

    parent: Turn | None
    context_ids: list[int]
    messages: tuple[Message, ...]
    key: bytes
    broken: str = ""

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return (self.parent.ids if self.parent else []) + self.context_ids

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return (self.parent.length if self.parent else 0) + len(self.context_ids)


@dataclass(eq=False, slots=True)
class Turn:
    """An answer of the policy's.

    Attributes:
        prompt: what it continues.
        generation: what was sampled.
        answer: the same as a message.
        agent_id: the part that the policy played: the model that was asked for.
        identifier: under which an agent knows it.
        children: answers that continue it.
    """

    prompt: Prompt
    generation: Generation
    answer: Answer
    agent_id: str = ""
    identifier: str = field(default_factory=lambda: uuid.uuid4().hex)
    children: list[Turn] = field(default_factory=list)
    length: int = field(init=False)
    """Number of tokens up to its end."""

    def __post_init__(self) -> None:
        self.length = self.prompt.length + len(self.generation.output_ids)

    @property
    def own_ids(self) -> list[int]:
        """Tokens behind those of the answer before it."""
        return self.prompt.context_ids + self.generation.output_ids

    @property
    def ids(self) -> list[int]:
        """All tokens up to its end."""
        return [token for turn in self.path() for token in turn.own_ids]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with it."""
        return (*self.prompt.messages, self.answer.message)

    def path(self) -> list[Turn]:
        """From the first answer of its tree to this one."""
        turns, turn = [], self
        while True:
            turns.append(turn)
            if turn.prompt.parent is None:
                return turns[::-1]
            turn = turn.prompt.parent


class Conversations:
    """Of one episode.

    Args:
        tokenizer: of the model.
        template_arguments: of the run; those of a request take precedence.

    Attributes:
        turns: answers that were given, in order.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = template_arguments or {}
        self._known: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self.turns: list[Turn] = []

    def find(self, identifier: str) -> Turn:
        """An answer by its identifier.

        Raises:
            RefusedError: there is none in this episode.
        """
        for turn in self.turns:
            if turn.identifier == identifier:
                return turn
        raise RefusedError(f"there is no answer {identifier!r:.80} in this episode", 404, "not_found")

    def place(self, request: AgentRequest) -> Prompt:
        """The tokens that answer a request continues.

        Raises:
            RefusedError: the chat template does not take the messages.
        """
        if request.prompt_ids:
            return self._place_ids(list(request.prompt_ids))
        messages = list(request.messages)
        if request.previous:
            earlier = self.find(request.previous).messages
            kept = earlier[1:] if request.opening and earlier[0]["role"] == "system" else earlier
            messages = [*request.opening, *kept, *messages]
        if not messages:
            raise RefusedError("the conversation has no messages")
        merged = {**self._template_arguments, **request.template_arguments}
        arguments = Conversation(messages, request.tools, merged).template_arguments
        keys = list(self._keys(messages, arguments))
        candidates, count = self._continued(messages, keys)
        parent = _the_one_meant(candidates, messages[count - 1], request.previous)
        if parent is None:
            return self._first(tuple(messages), keys[-1], arguments, "ambiguous" if candidates else "")
        later = messages[count:]
        history = (*parent.messages, *later)
        before, said = parent.prompt.messages, parent.answer.message
        try:
            with _sent_to_the_agent():
                ids, _ = between_turns(self._tokenizer, before, said, later, parent.generation.output_ids, **arguments)
        except RewrittenPrefixError:
            return self._first(history, keys[-1], arguments, "rewritten")
        return Prompt(parent, ids, history, keys[-1])

    def _continued(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[list[Turn], int]:
        """The latest answer among these messages, or several equal ones, and how many messages it ends."""
        for count in range(len(messages), 0, -1):
            if candidates := self._known.get(keys[count]):
                return candidates, count
        return [], 0

    def add(self, prompt: Prompt, generation: Generation, answer: Answer, agent_id: str) -> Turn:
        """An answer is about to be given; what continues it will be known."""
        turn = Turn(prompt, generation, answer, agent_id)
        self.turns.append(turn)
        self._known[_extended(prompt.key, answer.message)].append(turn)
        if prompt.parent is not None:
            prompt.parent.children.append(turn)
        return turn

    def discard(self, turns: Iterable[Turn]) -> None:
        """These answers never arrived; they are as if they had not been given."""
        for turn in turns:
            if turn in self.turns:
                self.turns.remove(turn)
                self._known[_extended(turn.prompt.key, turn.answer.message)].remove(turn)
                if turn.prompt.parent is not None:
                    turn.prompt.parent.children.remove(turn)

    def _keys(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> Iterator[bytes]:
        """One for no message, and one for each more. Of a sampled answer the thought may be missing or not."""
        key = hashlib.sha256(_canonical(arguments)).digest()
        yield key
        for message in messages:
            thought = str(message.get("reasoning_content") or "")
            bare = _extended(key, message)
            key = bare if not thought or self._known.get(bare) else hashlib.sha256(bare + thought.encode()).digest()
            yield key

    def _first(self, messages: tuple[Message, ...], key: bytes, arguments: Mapping[str, Any], broken: str) -> Prompt:
        with _sent_to_the_agent():
            ids, _ = apply_template(self._tokenizer, messages, **arguments)
        return Prompt(None, ids, messages, key, broken)

    def _place_ids(self, ids: list[int]) -> Prompt:
        """The longest answer that these tokens begin with is what they continue."""
        parent: Turn | None = None
        known, turns = 0, [turn for turn in self.turns if turn.prompt.parent is None]
        while fitting := [turn for turn in turns if ids[known : known + len(turn.own_ids)] == turn.own_ids]:
            parent = max(fitting, key=lambda turn: len(turn.own_ids))
            known, turns = known + len(parent.own_ids), parent.children
        key = hashlib.sha256(json.dumps(ids).encode()).digest()
        return Prompt(parent, ids[known:], ({"role": "user", "content": ""},), key)


@contextmanager
def _sent_to_the_agent() -> Iterator[None]:
    """Refuse a conversation that the chat template does not take, in the same words as a row."""
    try:
        yield
    except RowError as error:
        raise RefusedError(str(error)) from error


def _the_one_meant(candidates: Sequence[Turn], message: Message, previous: str) -> Turn | None:
    """That of several equal answers which a message repeats, by what an agent may have sent back; None if unknown."""
    identifiers = {call.get("id") for call in message.get("tool_calls") or ()}
    thought = message.get("reasoning_content")
    signs = (
        lambda turn: turn.identifier == previous,
        lambda turn: bool(identifiers) and {call["id"] for call in turn.answer.calls} == identifiers,
        lambda turn: thought is not None and turn.answer.message.get("reasoning_content") == thought,
    )
    for has_sign in signs:
        if len(candidates) > 1:
            candidates = [turn for turn in candidates if has_sign(turn)] or candidates
    return candidates[0] if len(candidates) == 1 else None


def _extended(key: bytes, message: Message) -> bytes:
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    told = {
        "role": message.get("role"),
        "content": message.get("content") or "",
        "calls": [[call.get("name"), call.get("arguments")] for call in calls],
        "name": message.get("name") or "",
    }
    return hashlib.sha256(key + _canonical(told)).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr, ensure_ascii=False).encode("utf-8", "surrogatepass")
