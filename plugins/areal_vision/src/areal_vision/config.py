"""Settings of images. This module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_core.chat import PromptSettings, encode, render_conversation, unrendered_problem
from areal_core.config import LocalPath, Settings
from areal_core.models import FAMILIES
from areal_core.sdk import RowError
from areal_vision.files import PILLOW_LIMIT, files_of, open_image
from areal_vision.prompts import check_places, image_token, read_shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Names of the image processor's config. A vision-language model has one of these files."""


class VisionTurnSettings(PromptSettings):
    """Settings of a workflow with images: one prompt, one answer, one score."""

    chat_template: Literal["always"] = Field(
        "always", description="The chat template is always applied, because it writes the placeholders of images."
    )
    text_has_special_tokens: Literal[False] = Field(
        False,
        description="Text that spells a special token is plain text; only the chat template writes special tokens.",
    )
    image_key: str | None = Field(
        None,
        description="Key of the row that holds its image, or a list of images. An image is a path, a file in base64 "
        "(data:image/png;base64,...), the bytes of a file, {bytes: ..., path: ...} as the library `datasets` "
        "returns it, or null for none. Images replace the image parts of the prompt in order; if the prompt is "
        "text, they come before it. null: `image` or `images`. Rewards get the row with the bytes of its images.",
    )
    folder: LocalPath = Field(
        default=Path(),
        validate_default=True,
        description="Folder that image paths are relative to. Default: the folder of the config.",
    )
    max_image_pixels: int = Field(
        50_000_000,
        ge=1,
        le=PILLOW_LIMIT,
        description="Maximum size of an image in pixels, width x height. A larger image fails its row before it is "
        "decoded.",
    )
    shows_images: ClassVar[bool] = True
    scores_answers: ClassVar[bool] = True

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Check that the model is a supported vision-language model with an image processor."""
        del config
        if model.description.get("vision_config") is None:
            yield (
                f"the model in {model.folder} ({model.description.get('model_type')}) is not a vision-language model: "
                "choose one of Qwen's (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), or a text workflow such as single_turn"
            )
        elif (kind := model.description.get("model_type")) not in FAMILIES:
            yield (
                f"images are supported with {', '.join(FAMILIES)}, not with '{kind}', which is trained on text only: "
                "choose a text workflow such as single_turn"
            )
        elif not any((model.folder / name).is_file() for name in PROCESSOR_FILES):
            yield f"the model in {model.folder} has no image processor ({PROCESSOR_FILES[0]}): save it there as well"

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why a row cannot be used; empty if it can. Without a tokenizer the chat template is not checked."""
        try:
            shown = read_shown(row, self, self.image_key)
        except RowError as error:
            return str(error)
        try:
            for file in files_of(shown.value, self.folder):
                open_image(file, self.max_image_pixels)
        except ValueError as error:
            return f"has an image that cannot be used: {error}"
        if tokenizer is None:
            return ""
        try:
            problem = unrendered_problem(tokenizer, shown.conversation)
            text = render_conversation(tokenizer, shown.conversation, add_generation_prompt=True)
            check_places(encode(tokenizer, text)[0], image_token(tokenizer), len(shown.images))
        except ValueError as error:  # includes RowError
            return str(error)
        return problem


class SquaresSettings(Settings):
    """Settings of the data set of squares."""

    split: Literal["train", "held_out"] = Field(
        "train",
        description="Split of the data. `held_out`: 64 rows with squares in positions that `train` does not have.",
    )
    rows: int = Field(2048, ge=1, description="Number of rows of the split `train`.")


class TinyModelSettings(Settings):
    """Settings of the tiny vision-language model."""

    seed: int = Field(0, description="Random seed of the weights.")
    head_size: Literal[16, 32] = Field(
        16, description="Size of the language model's attention heads. vLLM on a CPU needs 32."
    )
