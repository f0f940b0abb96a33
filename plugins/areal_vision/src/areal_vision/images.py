"""From the files of images to what a model takes, by the model's own image processor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from areal_vision.files import ImageFile, open_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image


class ImageInputs(NamedTuple):
    """Several images, cut into patches.

    Attributes:
        pixels: [patches, values of a patch] float32, the images one behind another.
        grid: [images, 3] int64, how many patches each has in time, height and width.
    """

    pixels: torch.Tensor
    grid: torch.Tensor


class ImageReader:
    """Reads files for one model.

    Args:
        model: its folder, or its name on the hub.

    Raises:
        ValueError: the model has no image processor that gives patches and their grid, as Qwen's models have.

    Attributes:
        merge: patches along each side of what one token stands for.
        context: tokens that the model takes; None where its config does not say.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig

        # `from transformers import AutoImageProcessor` needs torchvision in transformers 5.17; this module does not.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        factory: Any = AutoImageProcessor
        try:
            self._processor: Any = factory.from_pretrained(model)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"'{model}' has no image processor, so it is not a model for images: {error}") from error
        self.merge = int(getattr(self._processor, "merge_size", 0))
        if not self.merge:
            raise ValueError(
                f"the image processor of '{model}', {type(self._processor).__name__}, cuts no patches that the model "
                "merges: images are taken for models of Qwen's families (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)"
            )

        known = AutoConfig.from_pretrained(model)
        self.context: int | None = getattr(known.get_text_config(), "max_position_embeddings", None)

    def read(self, files: Sequence[bytes]) -> ImageInputs:
        """The patches of the images in these files.

        Raises:
            ValueError: one of them cannot be read; it is named by its place.
        """
        named = (ImageFile(f"image {number} of {len(files)}", file) for number, file in enumerate(files, 1))
        return self.cut([open_image(file) for file in named])

    def cut(self, images: Sequence[Image]) -> ImageInputs:
        """The patches of these images."""
        if not images:
            return ImageInputs(torch.zeros(0, self._values()), torch.zeros(0, 3, dtype=torch.int64))
        made = self._processor(images=list(images), return_tensors="pt")
        return ImageInputs(made["pixel_values"].float(), made["image_grid_thw"])

    def counts(self, grid: torch.Tensor) -> list[int]:
        """Image tokens of each image."""
        return token_counts(grid, self.merge).tolist()

    def _values(self) -> int:
        processor = self._processor
        return int(3 * processor.temporal_patch_size * processor.patch_size**2)


def token_counts(grid: torch.Tensor, merge: int) -> torch.Tensor:
    """[images] int64: the image tokens that stand for patches of `grid` [images, 3], merge x merge in one."""
    return grid.prod(-1) // merge**2


@lru_cache(maxsize=8)
def reader_of(model: str) -> ImageReader:
    """The reader of a model, made once in a process."""
    return ImageReader(model)
