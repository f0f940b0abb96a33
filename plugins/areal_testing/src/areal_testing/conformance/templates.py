"""A tokenizer without a model: one token a character, and the plainest chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_testing.fakes import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END = "\x00"
"""Ends a turn, as the token 0 that `FakeTokenizer` calls the end of a text."""


class TemplateTokenizer(FakeTokenizer):
    """`FakeTokenizer` with a chat template that only ever appends, `<user>words` and the end of the turn."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """The conversation as text, or as token ids."""
        text = "".join(f"<{message['role']}>{message['content']}{END}" for message in messages)
        text += "<assistant>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
