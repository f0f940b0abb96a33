"""Settings of images. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_core.config import LocalPath, Settings
from areal_vision.files import PILLOWS_LIMIT, files_of, open_image

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.interfaces import StoredModel

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of which a model for images has one."""


class VisionTurnSettings(Settings):
    """One prompt with images, one answer, one score."""

    prompt_key: str = Field("prompt", description="the row's key that holds the question, as text")
    image_key: str = Field(
        "image",
        description="the row's key that holds the image, or a list of them: a path, the text of a file in base64 "
        "(data:image/png;base64,...), the bytes of a file, or what `datasets` reads, {bytes: ..., path: ...}; null in "
        "a row that has none. Rewards of processes of their own take no bytes",
    )
    folder: LocalPath = Field(
        default=Path(), validate_default=True, description="that paths of images are relative to; the config's own"
    )
    system: str | None = Field(None, description="system message in front")
    max_image_pixels: int = Field(
        50_000_000,
        ge=1,
        le=PILLOWS_LIMIT,
        description="of an image, width x height; a larger one fails its row before its pixels are unpacked",
    )
    shows_images: ClassVar[bool] = True
    scores_answers: ClassVar[bool] = True

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """The model must see images."""
        del config
        if model.description.get("vision_config") is None:
            yield (
                f"the model in {model.folder} ({model.description.get('model_type')}) sees no images: choose one of "
                "Qwen's families (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), or a workflow of text, such as single_turn"
            )
        elif not any((model.folder / name).is_file() for name in PROCESSORS):
            yield f"the model in {model.folder} has no image processor ({PROCESSORS[0]}): save it there as well"

    def check_row(self, row: dict[str, Any]) -> str:
        """Before a run: what keeps it from playing this row; empty where nothing does."""
        for key, setting in ((self.prompt_key, "prompt_key"), (self.image_key, "image_key")):
            if key not in row:
                return f"has no '{key}', only {', '.join(row)}: set workflow.{setting}, or mend the data"
        try:
            for file in files_of(row[self.image_key], self.folder):
                open_image(file, self.max_image_pixels)
        except ValueError as error:
            return f"cannot be shown: {error}"
        return ""


class SquaresSettings(Settings):
    """Which squares."""

    split: Literal["train", "held_out"] = Field(
        "train", description="held_out are 64 rows, with squares where train has none"
    )
    rows: int = Field(2048, ge=1, description="of train")


class TinyModelSettings(Settings):
    """The model's random numbers, and its heads."""

    seed: int = Field(0, description="of its weights")
    head_size: Literal[16, 32] = Field(16, description="of the language model's attention; vLLM on a CPU needs 32")
