"""Settings of the core's workflows."""

from __future__ import annotations

from mimetypes import guess_type
from typing import Any, ClassVar, Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component

IMAGE_KEYS = ("image", "images")
UNSHOWN = "choose workflow: vision/single_turn (areal-vision), or take the images out of the data"


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

    scores_answers: ClassVar[bool] = True

    def check_row(self, row: dict[str, Any]) -> str:
        """Before a run: what keeps it from playing this row; empty where nothing does."""
        if self.prompt_key not in row:
            return f"has no '{self.prompt_key}', only {', '.join(row)}: set workflow.prompt_key, or mend the data"
        if self.system and self.chat_template != "always" and isinstance(row[self.prompt_key], str):
            return "has a prompt of text, which takes no workflow.system: set workflow.chat_template=always"
        if key := next((key for key in IMAGE_KEYS if _has_image(row.get(key))), ""):
            return f"has an image ('{key}'), and this workflow shows the model none: {UNSHOWN}"
        return ""


class MultiTurnSettings(PromptSettings):
    """A conversation with an environment."""

    environment: Selection = component("environments", description="the world that answers the policy's turns")
    max_turns: int = Field(4, ge=1, description="turns of the policy in one episode")
    max_tokens: int = Field(4096, ge=1, description="tokens of the whole conversation")
    turn_discount: float = Field(1.0, gt=0, le=1, description="the reward of turn k is multiplied by this to the k")


def _has_image(value: Any) -> bool:
    """Whether there is one; for other things are called images as well."""
    if isinstance(value, list):
        return any(map(_has_image, value))
    if isinstance(value, dict):  # as Hugging Face's data sets store them
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return value.startswith("data:image") or (guess_type(value)[0] or "").startswith("image/")
    return isinstance(value, bytes) or hasattr(value, "convert")
