"""Example tokenizers: from a row of a data set to the sequences that are learned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.chat import (
    PromptSettings,
    conversation_of,
    is_conversation,
    learned_text,
    learned_turns,
    looks_like_a_conversation,
    read_conversation,
)
from areal_core.data import FinishReason, Trajectory
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.chat import Message, Pieces

TOOL_KEYS = ("tools", "functions")
"""Keys of a row that hold tools; the last one is OpenAI's former name."""
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
"""Keys of a row that hold a whole conversation; the last two are ShareGPT's."""


def conversations(
    row: Mapping[str, Any],
    tokenizer: Any,
    *,
    max_tokens: int | None,
    overlong: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    text_has_special_tokens: bool | None = None,
    end_token: str | None = None,
) -> list[Trajectory]:
    """Return the sequences of a row in which the assistant's turns are learned, usually one.

    A chat template that writes earlier turns differently once others follow makes a sequence for each turn that it
    affects; see `chat.examples.learned_turns`.

    Args:
        row: has `messages` (role and content; every turn of the assistant is learned), or `prompt` and `completion`.
            As text, the tokenizer's end token follows the completion; as messages, the template writes the end. Its
            `tools`, `documents` and `chat_template_kwargs` go to the template.
        tokenizer: of the model.
        max_tokens, overlong, chat_template_kwargs, text_has_special_tokens, end_token: see `EncodingSettings`.

    Raises:
        RowError: the row has another form, is too long, or nothing in it is the assistant's.
    """
    encoding = _Encoding(row, tokenizer, chat_template_kwargs or {}, text_has_special_tokens, end_token)
    key = next((key for key in CONVERSATION_KEYS if row.get(key) is not None), None)
    if key is not None:
        sequences = encoding.turns(read_conversation(row[key], f"'{key}'"))
    elif row.get("prompt") is not None and row.get("completion") is not None:
        sequences = encoding.answered(row["prompt"], row["completion"])
    else:
        raise RowError(
            f"fine-tuning needs rows with 'messages', or with 'prompt' and 'completion'; this one has {', '.join(row)}"
        )
    limit = tokenizer.model_max_length if max_tokens is None else max_tokens
    return [found for pieces in sequences if (found := trajectory(pieces, limit, overlong)) is not None]


def preferences(
    row: Mapping[str, Any],
    tokenizer: Any,
    *,
    max_tokens: int | None,
    overlong: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    text_has_special_tokens: bool | None = None,
    end_token: str | None = None,
) -> list[Trajectory]:
    """Return two sequences, the chosen one first. What both have in common is not learned.

    Args:
        row: has `chosen` and `rejected`. Beside a `prompt` they are the answers to it, as text or as messages. Without
            one they are whole texts or whole conversations, and what they begin with alike is the prompt. A number
            `margin` is by how much the chosen one is better; 0 if there is none.
        tokenizer: of the model.
        max_tokens, overlong, chat_template_kwargs, text_has_special_tokens, end_token: see `EncodingSettings`; of each
            of the two.

    Returns:
        The two trajectories, with `is_chosen` (bool) and `margin` (float32); none if one is skipped as too long.

    Raises:
        RowError: the row has another form, is too long, or nothing in it is the assistant's.
    """
    try:
        margin = float(row.get("margin") or 0)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowError(f"'margin' is {row['margin']!r}; it must be a number, or left out")
    encoding = _Encoding(row, tokenizer, chat_template_kwargs or {}, text_has_special_tokens, end_token)
    limit = tokenizer.model_max_length if max_tokens is None else max_tokens
    found: list[Trajectory] = []
    for name, sequences in zip(("chosen", "rejected"), _sides(row, encoding), strict=True):
        if len(sequences) != 1:
            raise RowError(
                f"'{name}': the chat template rewrites earlier turns, so {len(sequences)} turns of the assistant "
                "cannot be one sequence: keep the last turn in 'chosen' and 'rejected', and the others in 'prompt'"
            )
        try:
            side = trajectory(sequences[0], limit, overlong)
        except RowError as error:
            raise RowError(f"'{name}': {error}") from error
        if side is None:
            return []
        if found and side.sequence["finish_reason"] == FinishReason.LENGTH and _is_same(side, found[0]):
            raise RowError(f"'chosen' and 'rejected' are equal within the {limit} tokens that they were cut to")
        side.sequence |= {"is_chosen": np.array(name == "chosen"), "margin": np.array(margin, np.float32)}
        found.append(side)
    return found


class _Encoding:
    """How the parts of one row become tokens."""

    def __init__(
        self,
        row: Mapping[str, Any],
        tokenizer: Any,
        arguments: Mapping[str, Any],
        text_has_special_tokens: bool | None,
        end_token: str | None,
    ) -> None:
        self._row, self._tokenizer, self._arguments = row, tokenizer, arguments
        self._has_special_tokens, self._end_token = text_has_special_tokens, end_token

    def turns(self, messages: Sequence[Message], first: int = 0) -> list[Pieces]:
        """Return the sequences in which the assistant's turns from the `first` message on are learned."""
        settings = PromptSettings.model_validate({"chat_template_kwargs": self._arguments})
        conversation = conversation_of(self._row, messages, settings)
        first = first and first + len(conversation.messages) - len(messages)  # a system message may come in front
        return learned_turns(self._tokenizer, conversation, first=first, end_token=self._end_token)

    def text(self, prompt: str, answer: str) -> Pieces:
        """Return the tokens of a prompt and its answer as text."""
        return learned_text(self._tokenizer, prompt, answer, has_special_tokens=bool(self._has_special_tokens))

    def answered(self, prompt: Any, completion: Any) -> list[Pieces]:
        """Return the sequences of a prompt, which is not learned, and its answer, which is.

        Text beside messages becomes a message: of the user, or of the assistant.

        Raises:
            RowError: one is neither text nor messages, or the answer begins with somebody else's turn.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            if shown := [key for key in ("system", *TOOL_KEYS, "documents") if self._row.get(key)]:
                raise RowError(
                    f"it has '{shown[0]}', which text without a chat template cannot show: store prompt and completion "
                    "as lists of messages"
                )
            for name, text in (("prompt", prompt), ("completion", completion)):
                if looks_like_a_conversation(text):
                    raise RowError(f"'{name}' is text that holds a whole conversation: store it as a list of messages")
            return [self.text(prompt, completion)]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        before, after = read_conversation(asked, "'prompt'"), read_conversation(said, "'completion'")
        if after[0]["role"] != "assistant":
            raise RowError(
                f"the answer begins with a turn of the {after[0]['role']}: leave out what the prompt has already"
            )
        return self.turns([*before, *after], first=len(before))


def _sides(row: Mapping[str, Any], encoding: _Encoding) -> list[list[Pieces]]:
    """Return the sequences of the chosen and of the rejected side."""
    prompt: Any = row.get("prompt")
    both: list[Any] = [row.get("chosen"), row.get("rejected")]
    if all(isinstance(side, str) for side in both):
        if prompt is not None:
            return [encoding.answered(prompt, side) for side in both]
        whole = [[token for part, _ in encoding.text("", side) for token in part] for side in both]
        same = _common(*whole)
        return [[[(side[:same], False), (side[same:], True)]] for side in whole]
    if all(is_conversation(side) for side in both):
        read = [read_conversation(side, f"'{name}'") for side, name in zip(both, ("chosen", "rejected"), strict=True)]
        same = _common(*read)
        # Some data sets repeat the question as text beside two whole conversations.
        asked = [None, "", *(message.get("content") for message in read[0][:same])]
        if prompt is None or (isinstance(prompt, str) and prompt in asked):
            return [encoding.turns(side, first=same) for side in read]
        return [encoding.answered(prompt, side) for side in both]
    forms = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
    raise RowError(
        "preferences need rows with 'chosen' and 'rejected', and 'prompt' unless both begin with it: all as text, or "
        f"all as lists of messages; this one has {forms}"
    )


def trajectory(pieces: Pieces, max_tokens: int | None, overlong: str) -> Trajectory | None:
    """Return one sequence of these pieces, at most `max_tokens` long, or None if it is skipped; see `EncodingSettings`.

    Raises:
        RowError: it is too long, or nothing in it is learned.
    """
    ids = np.array([token for tokens, _ in pieces for token in tokens], np.int64)
    mask = np.array([is_learned for tokens, is_learned in pieces for _ in tokens], np.bool_)
    is_cut = max_tokens is not None and len(ids) > max_tokens
    if is_cut and overlong == "skip":
        return None
    if is_cut and overlong == "refuse":
        raise RowError(
            f"it has {len(ids)} tokens, and {max_tokens} are allowed by algorithm.example_tokenizer.max_tokens or the "
            "model's context: leave out the row, or set algorithm.example_tokenizer.overlong to truncate or skip"
        )
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    if not bool(mask[1:].any()):  # nothing predicts the first token
        cut = f" within the {max_tokens} tokens that it was cut to" if is_cut else ""
        raise RowError(f"there is nothing to learn in it{cut}: no turn of the assistant, or an empty one")
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


def _is_same(one: Trajectory, other: Trajectory) -> bool:
    return np.array_equal(one.tokens["input_ids"], other.tokens["input_ids"])


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike, without the last one of the shorter: no answer is empty."""
    most = min(len(one), len(other)) - 1
    return next((place for place in range(most) if one[place] != other[place]), most)
