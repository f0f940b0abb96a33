"""Settings of how a row becomes a prompt, and of how it is rendered."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from areal_core.config import Settings


class TemplateSettings(Settings):
    """How the chat template and the tokenizer read a row."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Arguments of the chat template, such as {enable_thinking: false}. A row's own "
        "`chat_template_kwargs` take precedence, key by key.",
    )
    text_has_special_tokens: bool | None = Field(
        None,
        description="Whether text may contain special tokens. true: text was rendered with a chat template before, "
        "so `</s>` and the like are special tokens. false: they are plain characters. null: as false, but checks "
        "before the run refuse such text.",
    )


class PromptSettings(TemplateSettings):
    """How a row becomes the tokens of a prompt."""

    prompt_key: str = Field("prompt", description="Key of the row that holds the prompt: text, or a list of messages.")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto",
        description="When to apply the tokenizer's chat template. `auto`: to messages; text is continued as it is. "
        "`always`: text becomes a user message. `never`: prompts are text.",
    )
    tools_key: str | None = Field(
        "tools",
        description="Key of the row that holds the tools which the chat template shows to the model. null: no "
        "tools; a column named tools is then ordinary data.",
    )
    system: str | None = Field(
        None,
        description="System message for rows that have none of their own. Needs a prompt to which the template is "
        "applied.",
    )

    @model_validator(mode="after")
    def _applies_one_template(self) -> PromptSettings:
        if self.chat_template == "always" and self.text_has_special_tokens:
            raise ValueError(
                "chat_template: always would apply the template to text that was written with one before "
                "(text_has_special_tokens: true): keep one of the two"
            )
        return self
