"""From a row of the data set to the token ids of a prompt. What others have written never yields special tokens."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.workflows.settings import PromptSettings


def prompt_messages(row: Mapping[str, Any], settings: PromptSettings) -> list[dict[str, str]] | None:
    """The chat messages of a row, or None where its prompt is plain text to be continued.

    Raises:
        KeyError: the row has no such key; the message lists those it has.
    """
    if settings.prompt_key not in row:
        raise KeyError(f"the data row has no '{settings.prompt_key}'; it has {', '.join(row)}: set workflow.prompt_key")
    prompt = row[settings.prompt_key]
    if isinstance(prompt, str):
        if settings.chat_template != "always":
            return None
        prompt = [{"role": "user", "content": prompt}]
    if settings.chat_template == "never":
        raise ValueError("the prompt is a list of messages, which needs a template: workflow.chat_template is 'never'")
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    return [*system, *(dict(message) for message in prompt)]


def encode_prompt(tokenizer: Any, row: Mapping[str, Any], settings: PromptSettings) -> tuple[list[int], str]:
    """Token ids of the prompt, and the prompt as text."""
    messages = prompt_messages(row, settings)
    if messages is not None:
        ids, written = _encoded(tokenizer, render(tokenizer, messages, add_generation_prompt=True))
        return list(ids), written
    text = row[settings.prompt_key]
    ids, written = _encoded(tokenizer, text if settings.text_has_special_tokens else guard(tokenizer, text))
    return with_begin(tokenizer, ids), written


def with_begin(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The tokens of a plain text behind what the tokenizer itself puts in front of one, such as BOS; a template writes
    that by itself."""
    begin = _begin(tokenizer)
    return list(ids) if tuple(ids[: len(begin)]) == begin else [*begin, *ids]


@lru_cache(maxsize=8)
def _begin(tokenizer: Any) -> tuple[int, ...]:
    plain, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    ahead = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next((n for n in ahead if whole[n : n + len(plain)] == plain), 0)])


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> tuple[list[int], str]:
    """Token ids and text of a conversation that waits for the policy's turn; arguments are those of `render`."""
    return encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True, **arguments))


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **arguments: Any
) -> str:
    """A conversation as the tokenizer's template writes it, for `encode`: special tokens are the template's alone.

    Args:
        tokenizer: of the model.
        messages: with `role`, `content`, and whatever else the template knows.
        add_generation_prompt: whether the policy's turn is opened at the end.
        arguments: further ones of the template, such as `tools`.
    """
    text: str = tokenizer.apply_chat_template(
        guard(tokenizer, list(messages)),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **{name: guard(tokenizer, value) for name, value in arguments.items()},
    )
    return text


class RewrittenPrefixError(ValueError):
    """The chat template writes earlier turns in another way than before, so that tokens cannot be appended to them."""


def between_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    following: Sequence[Mapping[str, Any]],
    output_ids: Sequence[int],
    **arguments: Any,
) -> tuple[list[int], str]:
    """What the template puts between the end of a turn of the policy's and the start of its next one: ids and text.

    It is the difference of two renderings. The end of the turn is the policy's own where it wrote it; where it was cut
    at its length, or stopped at something else, the template's is put there, as context that is not learned from.

    Args:
        tokenizer: of the model.
        messages: before the policy's turn.
        answer: the turn as a message.
        following: the messages behind it.
        output_ids: the turn as it was sampled.
        arguments: of the template; see `render`.

    Raises:
        RewrittenPrefixError: the template writes earlier turns anew once others follow (some drop old thoughts).
    """
    before = render(tokenizer, [*messages, answer], add_generation_prompt=False, **arguments).rstrip("\n")
    after = render(tokenizer, [*messages, answer, *following], add_generation_prompt=True, **arguments)
    if not after.startswith(before):
        raise RewrittenPrefixError(
            "the chat template rewrites earlier turns, so tokens cannot be appended; use a workflow that starts a new "
            "trajectory for each turn"
        )
    probing = [*messages, {"role": "assistant", "content": _PROBE}]
    probe = render(tokenizer, probing, add_generation_prompt=False, **arguments)
    end = probe.rpartition(_PROBE)[2].rstrip("\n") if _PROBE in probe else ""
    end_ids = encode(tokenizer, end)[0]
    has_ended = list(output_ids[len(output_ids) - len(end_ids) :]) == end_ids
    return encode(tokenizer, ("" if has_ended else end) + after[len(before) :])


_PROBE = "probe"


def guard(tokenizer: Any, content: Any) -> Any:
    """Content in which a stand-in takes the place of whatever spells a special token, at any depth.

    Content that spells none is not changed at all, and neither are its tokens.
    """
    if isinstance(content, str):
        for number, spelling in enumerate(_special_tokens(tokenizer)):
            content = content.replace(spelling, chr(_STAND_INS + number))
        return content
    if isinstance(content, dict):
        return {guard(tokenizer, key): guard(tokenizer, value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [guard(tokenizer, value) for value in content]
    return content


def encode(tokenizer: Any, text: str) -> tuple[list[int], str]:
    """Token ids of a text with stand-ins, which become the ordinary tokens of what is spelled, and the text itself."""
    ids: list[int] = []
    written: list[str] = []
    spellings = _special_tokens(tokenizer)
    for piece in _STAND_IN.split(text):
        if _STAND_IN.fullmatch(piece) and ord(piece) - _STAND_INS < len(spellings):
            written.append(spellings[ord(piece) - _STAND_INS])
            ids += _ordinary_tokens(tokenizer)[written[-1]]
        elif piece:
            written.append(piece)
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids, "".join(written)


@lru_cache(maxsize=8)
def _ordinary_tokens(tokenizer: Any) -> dict[str, list[int]]:
    """The ordinary tokens of what spells a special one, by its spelling.

    From a copy: `split_special_tokens` is set on the tokenizer itself, and other threads encode with that meanwhile.
    """
    own = copy.deepcopy(tokenizer)
    return {
        spelling: own.encode(spelling, add_special_tokens=False, split_special_tokens=True)
        for spelling in _special_tokens(tokenizer)
    }


@lru_cache(maxsize=64)
def _encoded(tokenizer: Any, text: str) -> tuple[tuple[int, ...], str]:
    """`encode`, remembered: episodes of a group begin one after another, and all of them with the same prompt."""
    ids, written = encode(tokenizer, text)
    return tuple(ids), written


_STAND_INS: Final = 0xF0000
_STAND_IN: Final = re.compile("([\U000f0000-\U000fffff])")
"""Characters for private use, which no text has a meaning for."""


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """How the special tokens are spelled, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spelled = {*getattr(tokenizer, "all_special_tokens", ()), *(token.content for token in added if token.special)}
    return tuple(sorted(spelled - {""}, key=lambda text: (-len(text), text)))
