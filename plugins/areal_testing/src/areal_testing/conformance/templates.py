"""A tokenizer with one token for each character, and a plain chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_testing.fakes import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END = "\x00"
"""End of a turn: token 0, the end-of-sequence token of `FakeTokenizer`."""


class TemplateTokenizer(FakeTokenizer):
    """`FakeTokenizer` with an append-only chat template: each message is `<role>content` and the end of the turn."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """Return the conversation as text, or as token ids if `tokenize` is set."""
        text = "".join(f"<{message['role']}>{message['content']}{END}" for message in messages)
        text += "<assistant>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
