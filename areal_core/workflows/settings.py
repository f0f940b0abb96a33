"""Settings of the core's workflows."""

from __future__ import annotations

from mimetypes import guess_type
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_core.chat.answers import unrendered_problem
from areal_core.chat.examples import undecided_text
from areal_core.chat.rows import IMAGE_KEYS, prompt_of, read_prompt
from areal_core.chat.settings import PromptSettings
from areal_core.chat.template import Conversation
from areal_core.config import Selection, component
from areal_core.interfaces.workflow import RowError, SkippedRowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.chat.rows import Prompt
    from areal_core.config import RunConfig

_FIRST_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
"""The first bytes of PNG, JPEG, GIF and TIFF files."""
UNSHOWN = "choose workflow: vision/single_turn (areal-vision), or take the images out of the data"


class SingleTurnSettings(PromptSettings):
    """One prompt, one answer, one score."""

    scores_answers: ClassVar[bool] = True

    overlong: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What happens to a prompt that fills the model's context. `refuse` ends the run before it starts, "
        "or fails the prompt's group if the checks have not seen the row. `skip` leaves the row out and counts it; "
        "in an evaluation, as failed.",
    )

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why a row cannot be a prompt; empty if it can. Without a tokenizer its length is not checked.

        Raises:
            SkippedRowError: `overlong` leaves the row out.
        """
        if key := next((key for key, value in row.items() if _has_image(value, is_named=key in IMAGE_KEYS)), ""):
            return f"has an image ('{key}'), and this workflow shows the model none: {UNSHOWN}"
        try:
            prompt = prompt_of(row, self)
            if tokenizer is None:
                return ""
            problem = unrendered_problem(tokenizer, prompt) if isinstance(prompt, Conversation) else ""
            if not problem:
                self.check_length(read_prompt(tokenizer, row, self), tokenizer)
        except SkippedRowError:
            raise
        except RowError as error:
            return str(error)
        if problem:
            return problem
        if self.text_has_special_tokens is None:
            return undecided_text(tokenizer, row, [self.prompt_key], "workflow.text_has_special_tokens")
        return ""

    def check_length(self, prompt: Prompt, tokenizer: Any) -> None:
        """Raise `RowError` if a prompt leaves no room for an answer, and `SkippedRowError` if such rows are skipped."""
        tokens, context = len(prompt.input_ids), tokenizer.model_max_length
        if tokens < context:
            return
        problem = f"the prompt has {tokens:,} tokens, and the model's context has {context:,}: no answer has room"
        if self.overlong == "skip":
            raise SkippedRowError(problem)
        raise RowError(f"{problem}. Shorten it, leave out the row, or set workflow.overlong: skip")


class MultiTurnSettings(PromptSettings):
    """A conversation with an environment."""

    environment: Selection = component("environments", description="Environment that responds to the policy's turns.")
    max_turns: int = Field(4, ge=1, description="Maximum number of turns of the policy in one episode.")
    max_tokens: int = Field(
        4096, ge=1, description="Maximum number of tokens in the whole conversation, the prompt included."
    )
    turn_discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Discount of rewards by turn. The reward of turn k, counted from 0, is multiplied by this to "
        "the power of k.",
    )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Yield a note if the config has rewards: only the environment gives any."""
        if config.rewards:
            names = ", ".join(chosen.target for chosen in config.rewards)
            yield f"multi_turn does not call {names}: the environment gives the rewards; set rewards: []"


def _has_image(value: Any, *, is_named: bool) -> bool:
    """Return whether a value of a row is an image, or holds one.

    Args:
        value: of any column.
        is_named: the column is called an image: then text that is a path of one counts, and so do bytes of any format.
    """
    if isinstance(value, list | tuple):
        return any(_has_image(part, is_named=is_named) for part in value)
    if isinstance(value, dict):  # as Hugging Face's data sets store them
        file = value.get("bytes") or value.get("path")
        is_file = value.keys() <= {"bytes", "path"}
        return bool(file) and (is_named or (is_file and (_is_image(file) or _is_image(value.get("path")))))
    if isinstance(value, str):
        return value.startswith("data:image") or (is_named and _is_image(value))
    return _is_image(value) or (is_named and isinstance(value, bytes))


def _is_image(value: Any) -> bool:
    """Return whether a value is an image by itself: an object of Pillow, the bytes of a file, or a path of one."""
    if isinstance(value, bytes):
        return value.startswith(_FIRST_BYTES) or value[8:12] == b"WEBP"
    return hasattr(value, "getbands") or (isinstance(value, str) and (guess_type(value)[0] or "").startswith("image/"))
