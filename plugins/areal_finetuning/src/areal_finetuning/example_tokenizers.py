"""From a row of a data set to the tokens that are learned. What others have written never yields special tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.data import FinishReason, Trajectory
from areal_core.workflows.prompts import encode, guard, render, with_begin

if TYPE_CHECKING:
    Pieces = list[tuple[list[int], bool]]
    """Tokens in their order, and of each piece whether it is learned."""


def conversations(row: Mapping[str, Any], tokenizer: Any, *, max_tokens: int | None, overlong: str) -> list[Trajectory]:
    """One sequence, of which what the model shall say is learned.

    Args:
        row: has `messages` (role and content; every turn of the assistant is learned), or `prompt` and `completion`,
            both as text, which the tokenizer's end token follows, or both as messages.
        tokenizer: of the model.
        max_tokens, overlong: see `EncodingSettings`.

    Raises:
        ValueError: the row has another form, is too long, or nothing in it is the assistant's.
    """
    if "messages" in row:
        pieces = _turns(row["messages"], tokenizer)
    elif "prompt" in row and "completion" in row:
        pieces = answered(row["prompt"], row["completion"], tokenizer)
    else:
        raise ValueError(
            f"fine-tuning needs rows with 'messages', or with 'prompt' and 'completion'; this one has {', '.join(row)}"
        )
    return [trajectory(pieces, max_tokens, overlong)]


def preferences(row: Mapping[str, Any], tokenizer: Any, *, max_tokens: int | None, overlong: str) -> list[Trajectory]:
    """Two sequences, the chosen one first, which `is_chosen` says of them; what both have in common is not learned.

    Args:
        row: has `chosen` and `rejected`. Beside a `prompt` they are the answers to it, all three as text or all as
            messages; without one they are whole texts or whole conversations, and what they begin with alike is the
            prompt. A number `margin` says by how much the chosen one is better; it is 0 where the row has none.
        tokenizer: of the model.
        max_tokens, overlong: see `EncodingSettings`; of each of the two.

    Raises:
        ValueError: the row has another form, is too long, or nothing in it is the assistant's.
    """
    margin = float(row.get("margin") or 0)
    if not math.isfinite(margin):
        raise ValueError(f"'margin' is {margin}; it must be a number, or left out")
    sides = _sides(row, tokenizer)
    found = []
    for name, pieces in zip(("chosen", "rejected"), sides, strict=True):
        try:
            side = trajectory(pieces, max_tokens, overlong)
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from error
        side.sequence |= {"is_chosen": np.array(name == "chosen"), "margin": np.array(margin, np.float32)}
        found.append(side)
    return found


def _sides(row: Mapping[str, Any], tokenizer: Any) -> list[Pieces]:
    prompt: Any = row.get("prompt")
    both: list[Any] = [row.get("chosen"), row.get("rejected")]
    if all(isinstance(side, str) for side in both):
        if isinstance(prompt, str):
            return [answered(prompt, side, tokenizer) for side in both]
        if prompt is None:
            tokens = [[token for part, _ in answered("", side, tokenizer) for token in part] for side in both]
            same = _common(*tokens)
            return [[(side[:same], False), (side[same:], True)] for side in tokens]
    elif all(_is_conversation(side) for side in both):
        same = _common(*both)
        # Some data sets repeat the question as text beside two whole conversations.
        asked = [None, "", *(message.get("content") for message in both[0][:same])]
        if (prompt is None or isinstance(prompt, str)) and prompt in asked:
            return [_turns(side, tokenizer, first=same) for side in both]
        if _is_conversation(prompt):
            return [answered(prompt, side, tokenizer) for side in both]
    forms = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
    raise ValueError(
        "preferences need rows with 'chosen' and 'rejected', and 'prompt' unless both begin with it: all as text, or "
        f"all as lists of messages; this one has {forms}"
    )


def answered(prompt: Any, completion: Any, tokenizer: Any) -> Pieces:
    """A prompt, which is not learned, and its answer, which is; both text or both messages.

    Raises:
        ValueError: one is text and the other is not, the answer begins with somebody else's turn, or there is no token
            to end a text with.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token, which an answer as text must end with")
        _check_text(prompt + completion)
        asked, _ = encode(tokenizer, guard(tokenizer, prompt))
        said, _ = encode(tokenizer, guard(tokenizer, completion))
        return [(with_begin(tokenizer, asked), False), ([*said, tokenizer.eos_token_id], True)]
    if not (_is_conversation(prompt) and _is_conversation(completion)):
        raise ValueError("prompt and completion must both be text, or both lists of messages with role and content")
    if completion[0]["role"] != "assistant":
        raise ValueError(
            f"the answer begins with a turn of the {completion[0]['role']}: leave out what the prompt has already"
        )
    return _turns([*prompt, *completion], tokenizer, first=len(prompt))


def trajectory(pieces: Pieces, max_tokens: int | None, overlong: str) -> Trajectory:
    """One sequence of these pieces, at most `max_tokens` long; see `EncodingSettings`.

    Raises:
        ValueError: it is too long, or nothing in it is learned.
    """
    ids = np.array([token for tokens, _ in pieces for token in tokens], np.int64)
    mask = np.array([is_learned for tokens, is_learned in pieces for _ in tokens], np.bool_)
    is_cut = max_tokens is not None and len(ids) > max_tokens
    if is_cut and overlong == "refuse":
        raise ValueError(
            f"it has {len(ids)} tokens, and max_tokens is {max_tokens}: raise it, leave out the row, or set "
            "example_tokenizer.overlong to truncate"
        )
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    if not bool(mask[1:].any()):  # nothing predicts the first token
        cut = f" within the {max_tokens} tokens that it was cut to" if is_cut else ""
        raise ValueError(f"there is nothing to learn in it{cut}: no turn of the assistant, or an empty one")
    return Trajectory(
        {
            "input_ids": ids,
            "loss_mask": mask,
            "logprobs": np.zeros(len(ids), np.float32),
            "versions": np.full(len(ids), -1, np.int32),
            "turn_ids": np.full(len(ids), -1, np.int32),
        },
        {"finish_reason": np.array(int(FinishReason.LENGTH if is_cut else FinishReason.STOP), np.int8)},
    )


def _turns(messages: Any, tokenizer: Any, first: int = 0) -> Pieces:
    """A conversation as the tokenizer's template writes it; of its turns those of the assistant are learned.

    Only turns from the `first` message on are. A turn is what stands between the conversation that asks for it and the
    one that has it: the template's end of the turn is learned with it, a line break behind that is not.
    """
    if not _is_conversation(messages):
        raise ValueError("a conversation is a list of messages, each with role and content")
    for number, message in enumerate(messages):
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"message {number}, of the {message['role']}, has neither content nor tool_calls")
        if isinstance(content, str):
            _check_text(content)
    pieces: Pieces = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = render(tokenizer, messages[:number], add_generation_prompt=True)
        after = render(tokenizer, messages[: number + 1], add_generation_prompt=False).rstrip("\n")
        if not (before.startswith(written) and after.startswith(before)):
            raise ValueError(
                "the chat template rewrites earlier turns, so it cannot be said which tokens are whose: make a row of "
                "each turn of the assistant, with prompt and completion as messages"
            )
        pieces.append((encode(tokenizer, before[len(written) :])[0], False))
        pieces.append((encode(tokenizer, after[len(before) :])[0], True))
        written = after
    return pieces


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a character (a lone surrogate), which no tokenizer reads") from error


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike, the last one of the shorter left out: an answer is never empty."""
    most = min(len(one), len(other)) - 1
    return next((place for place in range(most) if one[place] != other[place]), most)
