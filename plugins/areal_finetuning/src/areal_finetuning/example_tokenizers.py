"""Example tokenizers: convert a row of a data set to the sequences that are trained on."""

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
"""Keys of a row that hold tools. `functions` is OpenAI's former name."""
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
"""Keys of a row that hold a whole conversation. `conversations` and `conversation` are ShareGPT's."""


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
    """Return the sequences of a row in which the assistant's turns are trained on; usually one.

    If the chat template rewrites earlier turns once others follow, each affected turn gets a sequence of its own; see
    `chat.examples.learned_turns`.

    Args:
        row: has `messages` (role and content; every turn of the assistant is trained on), or `prompt` and `completion`.
            If these are text, the tokenizer's end token follows the completion; if they are messages, the template
            writes the end. `tools`, `documents` and `chat_template_kwargs` of the row go to the template.
        tokenizer: tokenizer of the model.
        max_tokens, overlong, chat_template_kwargs, text_has_special_tokens, end_token: see `EncodingSettings`.

    Raises:
        RowError: the row has another form, is too long, or has no turn of the assistant.
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
    return [sequence for pieces in sequences if (sequence := trajectory(pieces, limit, overlong)) is not None]


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
    """Return two sequences, the chosen one first. Their common beginning is not trained on.

    Args:
        row: has `chosen` and `rejected`. With a `prompt` they are answers to it, as text or as messages. Without one
            they are whole texts or conversations, and their common beginning is the prompt. The number `margin` says by
            how much the chosen one is better; default 0.
        tokenizer: tokenizer of the model.
        max_tokens, overlong, chat_template_kwargs, text_has_special_tokens, end_token: see `EncodingSettings`; they
            apply to each of the two.

    Returns:
        Two trajectories with `is_chosen` (bool) and `margin` (float32); none if one is skipped as too long.

    Raises:
        RowError: the row has another form, is too long, or has no turn of the assistant.
    """
    try:
        margin = float(row.get("margin") or 0)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowError(f"'margin' is {row['margin']!r}; it must be a number or missing")
    encoding = _Encoding(row, tokenizer, chat_template_kwargs or {}, text_has_special_tokens, end_token)
    limit = tokenizer.model_max_length if max_tokens is None else max_tokens
    pair: list[Trajectory] = []
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
        if pair and side.sequence["finish_reason"] == FinishReason.LENGTH and _is_same(side, pair[0]):
            raise RowError(f"'chosen' and 'rejected' are equal within the first {limit} tokens, to which they were cut")
        side.sequence |= {"is_chosen": np.array(name == "chosen"), "margin": np.array(margin, np.float32)}
        pair.append(side)
    return pair


def labeled(
    row: Mapping[str, Any],
    tokenizer: Any,
    *,
    max_tokens: int | None,
    overlong: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    text_has_special_tokens: bool | None = None,
    end_token: str | None = None,
) -> list[Trajectory]:
    """Return the sequence of a prompt and its answer, with the answer's label.

    Args:
        row: has `prompt` and `completion`, as text or as messages, and `label`: true or 1 for a desirable answer, false
            or 0 for an undesirable one.
        tokenizer: tokenizer of the model.
        max_tokens, overlong, chat_template_kwargs, text_has_special_tokens, end_token: see `EncodingSettings`.

    Returns:
        A trajectory with `is_desirable` (bool); none if it is skipped as too long.

    Raises:
        RowError: the row has another form, is too long, or has no turn of the assistant.
    """
    missing = [key for key in ("prompt", "completion", "label") if row.get(key) is None]
    if missing:
        raise RowError(f"it needs 'prompt', 'completion' and 'label', but it lacks {', '.join(missing)}")
    if row["label"] not in (True, False):
        raise RowError(f"'label' is {row['label']!r}; it must be true for a desirable answer, or false")
    encoding = _Encoding(row, tokenizer, chat_template_kwargs or {}, text_has_special_tokens, end_token)
    sequences = encoding.answered(row["prompt"], row["completion"])
    if len(sequences) != 1:
        raise RowError(
            f"the chat template rewrites earlier turns, so {len(sequences)} turns of the assistant cannot be one "
            "sequence: keep the last turn in 'completion', and the others in 'prompt'"
        )
    limit = tokenizer.model_max_length if max_tokens is None else max_tokens
    sequence = trajectory(sequences[0], limit, overlong)
    if sequence is None:
        return []
    sequence.sequence["is_desirable"] = np.array(bool(row["label"]))
    return [sequence]


class _Encoding:
    """Converts the parts of one row to tokens."""

    def __init__(
        self,
        row: Mapping[str, Any],
        tokenizer: Any,
        arguments: Mapping[str, Any],
        text_has_special_tokens: bool | None,
        end_token: str | None,
    ) -> None:
        self._row = row
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._has_special_tokens = text_has_special_tokens
        self._end_token = end_token

    def turns(self, messages: Sequence[Message], first: int = 0) -> list[Pieces]:
        """Return the sequences in which the assistant's turns from message `first` on are trained on."""
        settings = PromptSettings.model_validate({"chat_template_kwargs": self._arguments})
        conversation = conversation_of(self._row, messages, settings)
        first = first and first + len(conversation.messages) - len(messages)  # a system message may have been added
        return learned_turns(self._tokenizer, conversation, first=first, end_token=self._end_token)

    def text(self, prompt: str, answer: str) -> Pieces:
        """Return the tokens of a prompt and its answer, both text."""
        return learned_text(self._tokenizer, prompt, answer, has_special_tokens=bool(self._has_special_tokens))

    def answered(self, prompt: Any, completion: Any) -> list[Pieces]:
        """Return the sequences of a prompt, which is not trained on, and its answer, which is.

        If only one of them is text, it becomes a message of the user or the assistant.

        Raises:
            RowError: one is neither text nor messages, or the answer begins with a turn of another role.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            if unused := [key for key in ("system", *TOOL_KEYS, "documents") if self._row.get(key)]:
                raise RowError(
                    f"it has '{unused[0]}', which needs a chat template; text has none: store prompt and completion "
                    "as lists of messages"
                )
            for name, text in (("prompt", prompt), ("completion", completion)):
                if looks_like_a_conversation(text):
                    raise RowError(f"'{name}' is text that holds a whole conversation: store it as a list of messages")
            return [self.text(prompt, completion)]
        prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        completion_messages = (
            [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        )
        before, after = (
            read_conversation(prompt_messages, "'prompt'"),
            read_conversation(completion_messages, "'completion'"),
        )
        if after[0]["role"] != "assistant":
            raise RowError(
                f"the answer begins with a turn of the {after[0]['role']}: remove the turns that the prompt already has"
            )
        return self.turns([*before, *after], first=len(before))


def _sides(row: Mapping[str, Any], encoding: _Encoding) -> list[list[Pieces]]:
    """Return the sequences of the chosen side and of the rejected side."""
    prompt: Any = row.get("prompt")
    both: list[Any] = [row.get("chosen"), row.get("rejected")]
    if all(isinstance(side, str) for side in both):
        if prompt is not None:
            return [encoding.answered(prompt, side) for side in both]
        whole = [[token for part, _ in encoding.text("", side) for token in part] for side in both]
        shared = _common(*whole)
        return [[[(side[:shared], False), (side[shared:], True)]] for side in whole]
    if all(is_conversation(side) for side in both):
        conversations = [
            read_conversation(side, f"'{name}'") for side, name in zip(both, ("chosen", "rejected"), strict=True)
        ]
        shared = _common(*conversations)
        # Some data sets repeat the question as text in addition to two whole conversations.
        repeated_texts = [None, "", *(message.get("content") for message in conversations[0][:shared])]
        if prompt is None or (isinstance(prompt, str) and prompt in repeated_texts):
            return [encoding.turns(side, first=shared) for side in conversations]
        return [encoding.answered(prompt, side) for side in both]
    forms = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
    raise RowError(
        "preferences need rows with 'chosen' and 'rejected', and 'prompt' unless both begin with it: all as text, or "
        f"all as lists of messages; this one has {forms}"
    )


def trajectory(pieces: Pieces, max_tokens: int | None, overlong: str) -> Trajectory | None:
    """Return one sequence of these pieces, at most `max_tokens` long, or None if it is skipped; see `EncodingSettings`.

    Raises:
        RowError: it is too long, or no token of it is trained on.
    """
    ids = np.array([token for tokens, _ in pieces for token in tokens], np.int64)
    mask = np.array([is_learned for tokens, is_learned in pieces for _ in tokens], np.bool_)
    is_cut = max_tokens is not None and len(ids) > max_tokens
    if is_cut and overlong == "skip":
        return None
    if is_cut and overlong == "refuse":
        raise RowError(
            f"it has {len(ids)} tokens, but {max_tokens} are allowed by algorithm.example_tokenizer.max_tokens or the "
            "model's context: remove the row, or set algorithm.example_tokenizer.overlong to truncate or skip"
        )
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    if not bool(mask[1:].any()):  # the first token has no prediction
        cut = f" within the first {max_tokens} tokens, to which it was cut" if is_cut else ""
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
    """Return the length of the common beginning, at most all but one item of the shorter one: no answer is empty."""
    limit = min(len(one), len(other)) - 1
    return next((index for index in range(limit) if one[index] != other[index]), limit)
