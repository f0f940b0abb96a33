"""The tokens of a prompt, for a workflow that asks a row's prompt as it is. `areal_core.chat` has the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.chat.rows import read_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.chat.settings import PromptSettings


def encode_prompt(tokenizer: Any, row: Mapping[str, Any], settings: PromptSettings) -> tuple[list[int], str]:
    """Return the token ids of a row's prompt, and the prompt as text.

    Raises:
        RowError: the row has no prompt, or one that cannot be used.
    """
    prompt = read_prompt(tokenizer, row, settings)
    return prompt.input_ids, prompt.text
