"""Store the conversations of an episode as a tree of answers with their exact tokens.

A request whose messages continue an earlier answer continues its **token ids**. The policy's tokens are never tokenized
again; the tokens of the messages in between are the difference of two renderings of the chat template. A new tree
begins, and is counted, if the template rewrites earlier turns or if the request could continue several answers.
"""

from __future__ import annotations

import hashlib
import json
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
    """The prompt of an answer, as a continuation of an earlier answer.

    Attributes:
        parent: the previous answer in the same tree; None if the answer begins a tree.
        context_ids: tokens between the end of `parent` and the answer; the whole prompt if there is no parent.
        messages: the conversation so far. The policy's answers are stored as sampled, not as the agent sent them back.
        key: hash of the conversation so far.
        broken: why the answer begins a tree although it continues a conversation: "rewritten" (the template changes
            earlier turns) or "ambiguous" (several answers fit). Empty if neither applies.
    """

    parent: Turn | None
    context_ids: list[int]
    messages: tuple[Message, ...]
    key: bytes
    broken: str = ""

    @property
    def ids(self) -> list[int]:
        """All token ids of the prompt."""
        return (self.parent.ids if self.parent else []) + self.context_ids

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return (self.parent.length if self.parent else 0) + len(self.context_ids)


@dataclass(eq=False, slots=True)
class Turn:
    """One answer of the policy.

    Attributes:
        prompt: the prompt that was answered.
        generation: the sampled tokens.
        answer: the sampled tokens, parsed into a message.
        agent_id: agent that sent the request.
        identifier: id of the response that the agent received.
        children: answers that continue this one.
        length: number of tokens of the prompt and the answer.
    """

    prompt: Prompt
    generation: Generation
    answer: Answer
    agent_id: str
    identifier: str
    children: list[Turn] = field(default_factory=list)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.prompt.length + len(self.generation.output_ids)

    @property
    def own_ids(self) -> list[int]:
        """Token ids after the end of the parent: its context and the answer."""
        return self.prompt.context_ids + self.generation.output_ids

    @property
    def ids(self) -> list[int]:
        """All token ids of the prompt and the answer."""
        return [token for turn in self.path() for token in turn.own_ids]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to and including the answer."""
        return (*self.prompt.messages, self.answer.message)

    def path(self) -> list[Turn]:
        """Return the answers from the root of the tree to this one."""
        turns, turn = [], self
        while True:
            turns.append(turn)
            if turn.prompt.parent is None:
                return turns[::-1]
            turn = turn.prompt.parent


class Conversations:
    """The conversations of one episode.

    Args:
        tokenizer: tokenizer of the model.
        template_arguments: the run's arguments of the chat template. Arguments of a request take precedence.

    Attributes:
        turns: answers in the order in which they were generated.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = template_arguments or {}
        self._known: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self.turns: list[Turn] = []

    def find(self, identifier: str) -> Turn:
        """Return an answer by its identifier.

        Raises:
            RefusedError: this episode has no such answer.
        """
        for turn in self.turns:
            if turn.identifier == identifier:
                return turn
        raise RefusedError(f"there is no answer {identifier!r:.80} in this episode", 404, "not_found")

    def place(self, request: AgentRequest) -> Prompt:
        """Return the prompt for a request, as a continuation of an earlier answer where one fits.

        Raises:
            RefusedError: the chat template rejects the messages, or `request.previous` is unknown.
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
        keys = list(self._keys(messages, arguments, request.session))
        candidates, count = self._continued(messages, keys)
        parent = _choose_parent(candidates, messages[count - 1], request.previous)
        if parent is None:
            return self._first(tuple(messages), keys[-1], arguments, "ambiguous" if candidates else "")
        later = messages[count:]
        history = (*parent.messages, *later)
        before, answered = parent.prompt.messages, parent.answer.message
        output_ids = parent.generation.output_ids
        try:
            with _refuse_bad_rows():
                ids, _ = between_turns(self._tokenizer, before, answered, later, output_ids, **arguments)
        except RewrittenPrefixError:
            return self._first(history, keys[-1], arguments, "rewritten")
        return Prompt(parent, ids, history, keys[-1])

    def _continued(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[list[Turn], int]:
        """Return the latest answer that these messages contain, or all that are equal to it, and its message count."""
        for count in range(len(messages), 0, -1):
            if candidates := self._known.get(keys[count]):
                return candidates, count
        return [], 0

    def add(self, prompt: Prompt, generation: Generation, answer: Answer, agent_id: str, identifier: str) -> Turn:
        """Store an answer, so that later requests can continue it. Call this before the answer is sent."""
        turn = Turn(prompt, generation, answer, agent_id, identifier)
        self.turns.append(turn)
        self._known[_extended(prompt.key, answer.message)].append(turn)
        if prompt.parent is not None:
            prompt.parent.children.append(turn)
        return turn

    def discard(self, turns: Iterable[Turn]) -> int:
        """Remove answers that never reached the agent. Return how many there were."""
        before = len(self.turns)
        for turn in turns:
            if turn in self.turns:
                self.turns.remove(turn)
                self._known[_extended(turn.prompt.key, turn.answer.message)].remove(turn)
                if turn.prompt.parent is not None:
                    turn.prompt.parent.children.remove(turn)
        return before - len(self.turns)

    def _keys(self, messages: Sequence[Message], arguments: Mapping[str, Any], session: str) -> Iterator[bytes]:
        """Yield the hash of each prefix of the messages, from the empty one on.

        A sampled answer is also found if the agent sends it back without its reasoning. Agents with a session
        identifier continue their own answers only.
        """
        key = hashlib.sha256(_canonical(arguments) + session.encode()).digest()
        yield key
        for message in messages:
            thought = str(message.get("reasoning_content") or "")
            bare = _extended(key, message)
            key = bare if not thought or self._known.get(bare) else hashlib.sha256(bare + thought.encode()).digest()
            yield key

    def _first(self, messages: tuple[Message, ...], key: bytes, arguments: Mapping[str, Any], broken: str) -> Prompt:
        with _refuse_bad_rows():
            ids, _ = apply_template(self._tokenizer, messages, **arguments)
        return Prompt(None, ids, messages, key, broken)

    def _place_ids(self, ids: list[int]) -> Prompt:
        """Return the prompt for token ids, as a continuation of the longest answer that they begin with."""
        parent: Turn | None = None
        matched, turns = 0, [turn for turn in self.turns if turn.prompt.parent is None]
        while fitting := [turn for turn in turns if ids[matched : matched + len(turn.own_ids)] == turn.own_ids]:
            parent = max(fitting, key=lambda turn: len(turn.own_ids))
            matched, turns = matched + len(parent.own_ids), parent.children
        key = hashlib.sha256(json.dumps(ids).encode()).digest()
        return Prompt(parent, ids[matched:], ({"role": "user", "content": ""},), key)


@contextmanager
def _refuse_bad_rows() -> Iterator[None]:
    """Refuse a conversation that the chat template rejects, with the message that a row would get."""
    try:
        yield
    except RowError as error:
        raise RefusedError(str(error)) from error


def _choose_parent(candidates: Sequence[Turn], message: Message, previous: str) -> Turn | None:
    """Return which of several equal answers a message repeats, or None if that is unknown.

    Agents may send back the id of the response, the ids of its calls, or its reasoning.
    """
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
    content = {
        "role": message.get("role"),
        "content": message.get("content") or "",
        "calls": [[call.get("name"), call.get("arguments")] for call in calls],
        "name": message.get("name") or "",
    }
    return hashlib.sha256(key + _canonical(content)).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr, ensure_ascii=False).encode("utf-8", "surrogatepass")
