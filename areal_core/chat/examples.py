"""From conversations and finished texts to the tokens that a model learns: fine-tuning, preferences, distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.chat.answers import end_mark, ends_with_a_token, opened_by_template
from areal_core.chat.messages import check_text
from areal_core.chat.template import encode_pieces, guard, render_conversation, special_tokens, spelled_out, with_begin
from areal_core.interfaces.workflow import RowError

if TYPE_CHECKING:
    from areal_core.chat.messages import Message
    from areal_core.chat.template import Conversation

Pieces = list[tuple[list[int], bool]]
"""Token ids in order; for each piece whether it is learned."""


def learned_text(tokenizer: Any, prompt: str, answer: str, *, has_special_tokens: bool = False) -> Pieces:
    """Return a prompt as text, which is not learned, and its answer with the end token, which is.

    Args:
        tokenizer: of the model.
        prompt: may be empty.
        answer: the tokenizer's end token follows it, unless the answer has one.
        has_special_tokens: what spells a special token is one, because the text was written with a template before.

    Raises:
        RowError: the tokenizer has no end token, or a text cannot be encoded.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise RowError("the tokenizer has no end-of-sequence token, which an answer as text must end with")
    for name, text in (("prompt", prompt), ("answer", answer)):
        check_text(text, f"the {name}")
    written = [text if has_special_tokens else guard(tokenizer, text) for text in (prompt, answer)]
    asked, said = encode_pieces(tokenizer, written)
    if not said or said[-1] != end:
        said = [*said, end]
    return [(with_begin(tokenizer, asked), False), (said, True)]


def looks_finished(tokenizer: Any, text: str) -> bool:
    """Return whether a text seems to be written with a chat template: it spells one of the special tokens."""
    return any(spelling in text for spelling in special_tokens(tokenizer) if len(spelling) > 3)


def learned_turns(
    tokenizer: Any, conversation: Conversation, *, first: int = 0, end_token: str | None = None
) -> list[Pieces]:
    """Return the sequences in which a model learns the assistant's turns of a conversation.

    A turn is what the policy would write after the template opened its turn, with the template's end. Usually all turns
    are in one sequence. A template that writes earlier turns differently once others follow (reasoning models drop old
    thoughts) makes a further sequence for each turn that it affects, so that every turn is learned after exactly the
    tokens that it will follow.

    A turn with `weight: 0` or `train: false` is context, as OpenAI's and axolotl's files have it.

    Args:
        tokenizer: of the model.
        conversation: messages and template arguments.
        first: number of the first message that may be learned.
        end_token: follows each learned turn if the template writes no end.

    Raises:
        RowError: no turn is learned, the template writes no end, or it drops a thought that is to be learned.
    """
    sequences: list[list[tuple[str, bool]]] = []
    written = ""
    mark = end_mark(tokenizer, conversation)
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or number < first or not _is_learned(message, number):
            continue
        before = render_conversation(
            tokenizer, conversation.with_messages(conversation.messages[:number]), add_generation_prompt=True
        )
        turn = _turn(tokenizer, conversation, number, before, mark)
        if not ends_with_a_token(tokenizer, turn) and end_token is None:
            raise RowError(
                "the chat template writes no end token after an answer, so the model would not learn to stop: write "
                "one there in the template, or set example_tokenizer.end_token to the token that ends an answer"
            )
        if sequences and before.startswith(written):
            sequences[-1].append((before[len(written) :], False))
        else:
            sequences.append([(before, False)])
        sequences[-1].append((turn, True))
        written = before + turn
    if not sequences:
        raise RowError("there is nothing to learn in it: no turn of the assistant")
    return [_encoded(tokenizer, sequence, end_token) for sequence in sequences]


def _turn(tokenizer: Any, conversation: Conversation, number: int, before: str, mark: str) -> str:
    """Return what the policy writes in a turn, its end included, as text with stand-ins."""
    message = conversation.messages[number]
    content, thought = message.get("content"), message.get("reasoning_content")
    whole = render_conversation(
        tokenizer, conversation.with_messages(conversation.messages[: number + 1]), add_generation_prompt=False
    )
    turn = whole[len(before) :] if whole.startswith(before) else None
    if turn is not None:
        place = turn.rfind(mark) if mark else -1
        turn = turn[: place + len(mark)] if place >= 0 else turn.rstrip("\n")
    plain = spelled_out(tokenizer, turn) if turn is not None else ""
    if thought and thought.strip() not in plain:
        raise RowError(
            f"the chat template does not write reasoning_content, which message {number} has: write the thought into "
            "the content, in the form in which the model writes it"
        )
    own_thought = content.rpartition("</think>")[0] if isinstance(content, str) else ""
    if turn is not None and own_thought.removeprefix("<think>").strip() in plain:
        return turn
    # The template strips the thought from the content, or opened one: what the policy writes is the content as it is.
    opened = opened_by_template(tokenizer, conversation.with_messages(conversation.messages[:number]), before).strip()
    if not isinstance(content, str) or message.get("tool_calls") or not own_thought:
        raise RowError(
            f"the chat template opens the assistant's turn with {opened!r}, and message {number} does not continue it: "
            "write the thought into the content, such as '<think>...</think>answer', or switch thoughts off in "
            "chat_template_kwargs"
            if opened
            else f"the chat template writes message {number} differently from a turn that it opens for the policy, so "
            "it is unclear which tokens are the assistant's"
        )
    said = content.removeprefix(opened).lstrip("\n") if opened and content.startswith(opened) else content
    return guard(tokenizer, said) + mark


def _is_learned(message: Message, number: int) -> bool:
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1) or not isinstance(train, bool):
        raise RowError(f"message {number} has weight {weight!r} and train {train!r}; they are 0 or 1, true or false")
    return bool(weight) and train


def _encoded(tokenizer: Any, sequence: list[tuple[str, bool]], end_token: str | None) -> Pieces:
    ids = encode_pieces(tokenizer, [text for text, _ in sequence])
    pieces: Pieces = []
    for part, (text, is_learned) in zip(ids, sequence, strict=True):
        lacks_end = is_learned and end_token is not None and not ends_with_a_token(tokenizer, text)
        end = [tokenizer.convert_tokens_to_ids(end_token)] if lacks_end else []
        pieces.append(([*part, *end], is_learned))
    return pieces
