"""From a row of the data set to the token ids of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    if messages is None:
        text = row[settings.prompt_key]
        return list(tokenizer.encode(text, add_special_tokens=False)), text
    return apply_template(tokenizer, messages)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], str]:
    """Token ids and text of a conversation that waits for the policy's turn."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False)), text
