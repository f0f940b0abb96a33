"""Settings of the core's workflows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component


class PromptSettings(Settings):
    """How a row becomes the tokens of a prompt."""

    prompt_key: str = Field("prompt", description="the row's key that holds the prompt: text, or a list of messages")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="auto applies the tokenizer's template to messages and leaves text as it is"
    )
    text_has_special_tokens: bool = Field(
        False, description="prompts of text are written with a template already: what spells a special token is one"
    )
    system: str | None = Field(None, description="system message in front, where the template is applied")


class SingleTurnSettings(PromptSettings):
    """One prompt, one answer, one score."""

    def check_row(self, row: dict[str, Any]) -> str:
        """Before a run: what keeps it from playing this row; empty where nothing does."""
        words = f"has no '{self.prompt_key}', only {', '.join(row)}: set workflow.prompt_key, or mend the data"
        return "" if self.prompt_key in row else words


class MultiTurnSettings(PromptSettings):
    """A conversation with an environment."""

    environment: Selection = component("environments", description="the world that answers the policy's turns")
    max_turns: int = Field(4, ge=1, description="turns of the policy in one episode")
    max_tokens: int = Field(4096, ge=1, description="tokens of the whole conversation")
    turn_discount: float = Field(1.0, gt=0, le=1, description="the reward of turn k is multiplied by this to the k")
