"""Settings of the core's workflows."""

from __future__ import annotations

from mimetypes import guess_type
from typing import Any, ClassVar

from pydantic import Field

from areal_core.chat.answers import unshown
from areal_core.chat.examples import undecided_text
from areal_core.chat.rows import prompt_of
from areal_core.chat.settings import PromptSettings
from areal_core.chat.template import Conversation
from areal_core.config import Selection, component
from areal_core.interfaces.workflow import RowError

IMAGE_KEYS = ("image", "images")
UNSHOWN = "choose workflow: vision/single_turn (areal-vision), or take the images out of the data"


class SingleTurnSettings(PromptSettings):
    """One prompt, one answer, one score."""

    scores_answers: ClassVar[bool] = True

    def check_row(self, row: dict[str, Any]) -> str:
        """Return why a row cannot be asked; empty if it can. Called before a run, without the model."""
        if key := next((key for key in IMAGE_KEYS if _has_image(row.get(key))), ""):
            return f"has an image ('{key}'), and this workflow shows the model none: {UNSHOWN}"
        try:
            prompt_of(row, self)
        except RowError as error:
            return str(error)
        return ""

    def check_prompt(self, row: dict[str, Any], tokenizer: Any) -> str:
        """Return why this model cannot be asked a row; empty if it can. Called before a run, with its tokenizer."""
        try:
            asked = prompt_of(row, self)
            missing = unshown(tokenizer, asked) if isinstance(asked, Conversation) else []
        except RowError as error:
            return str(error)
        if missing:
            return f"the chat template leaves out {', '.join(missing)}: take another template, or change the row"
        if isinstance(asked, str) and self.text_has_special_tokens is None:
            return undecided_text(tokenizer, row, [self.prompt_key], "workflow.text_has_special_tokens")
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
