"""From a row of the data set to the token ids of a prompt. What others have written never yields special tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.workflows.settings import PromptSettings


MOST_CHARACTERS = 2_000_000
"""Of a conversation, some half a million tokens; what is longer would hold up everything else while it is tokenized."""


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
        text = render(tokenizer, messages, add_generation_prompt=True)
    else:
        text = row[settings.prompt_key]
        text = text if settings.text_has_special_tokens else guard(tokenizer, text)
    ids, written = _encoded(tokenizer, text)
    return list(ids), written


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], str]:
    """Token ids and text of a conversation that waits for the policy's turn."""
    return encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True))


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    """A conversation as the tokenizer's template writes it, for `encode`: special tokens are the template's alone."""
    guarded = [{key: guard(tokenizer, value) for key, value in message.items()} for message in messages]
    text: str = tokenizer.apply_chat_template(guarded, tokenize=False, add_generation_prompt=add_generation_prompt)
    return text


def guard(tokenizer: Any, content: Any) -> Any:
    """Content in which a stand-in takes the place of whatever spells a special token; what is no text stays as it is.

    Content that spells none is not changed at all, and neither are its tokens.
    """
    if isinstance(content, str):
        for number, spelling in enumerate(_special_tokens(tokenizer)):
            content = content.replace(spelling, chr(_STAND_INS + number))
    return content


def encode(tokenizer: Any, text: str) -> tuple[list[int], str]:
    """Token ids of a text with stand-ins, which become the ordinary tokens of what is spelled, and the text itself."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(text):,} characters is longer than any context: {MOST_CHARACTERS:,} at most")
    ids: list[int] = []
    written: list[str] = []
    spellings = _special_tokens(tokenizer)
    for piece in _STAND_IN.split(text):
        if _STAND_IN.fullmatch(piece) and ord(piece) - _STAND_INS < len(spellings):
            written.append(spellings[ord(piece) - _STAND_INS])
            ids += tokenizer.encode(written[-1], add_special_tokens=False, split_special_tokens=True)
        elif piece:
            written.append(piece)
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids, "".join(written)


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
