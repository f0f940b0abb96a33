"""Convert image files to the inputs of a model, with the model's own image processor."""

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
        pixels: [patches, values of a patch] float32, the patches of all images concatenated.
        grid: [images, 3] int64, the number of patches of each image in time, height and width.
    """

    pixels: torch.Tensor
    grid: torch.Tensor


class ImageReader:
    """Reads image files for one model.

    Args:
        model: folder of the model, or its name on the hub.

    Attributes:
        merge: number of patches along each side of the square that one image token stands for.
        context: maximum number of tokens of the model; None if its config does not have it.

    Raises:
        ValueError: the model has no image processor that returns patches and their grid, as Qwen's models have.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig

        # In transformers 5.17 `from transformers import AutoImageProcessor` requires torchvision; this module does not.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        factory: Any = AutoImageProcessor
        try:
            self._processor: Any = factory.from_pretrained(model)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"'{model}' has no image processor, so it is not a vision-language model: {error}"
            ) from error
        self.merge = int(getattr(self._processor, "merge_size", 0))
        if not self.merge:
            raise ValueError(
                f"the image processor of '{model}', {type(self._processor).__name__}, does not return merged patches: "
                "images are supported with Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
            )

        config = AutoConfig.from_pretrained(model)
        self.context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)

    def read(self, files: Sequence[bytes]) -> ImageInputs:
        """Return the patches of the images in these files.

        Raises:
            ValueError: a file cannot be read; the message has its position.
        """
        named = (ImageFile(f"image {number} of {len(files)}", file) for number, file in enumerate(files, 1))
        return self.cut([open_image(file) for file in named])

    def cut(self, images: Sequence[Image]) -> ImageInputs:
        """Return the patches of these images."""
        if not images:
            return ImageInputs(torch.zeros(0, self._values()), torch.zeros(0, 3, dtype=torch.int64))
        inputs = self._processor(images=list(images), return_tensors="pt")
        return ImageInputs(inputs["pixel_values"].float(), inputs["image_grid_thw"])

    def counts(self, grid: torch.Tensor) -> list[int]:
        """Return the number of image tokens of each image."""
        return token_counts(grid, self.merge).tolist()

    def _values(self) -> int:
        processor = self._processor
        return int(3 * processor.temporal_patch_size * processor.patch_size**2)


def token_counts(grid: torch.Tensor, merge: int) -> torch.Tensor:
    """Return the number of image tokens of each image, [images] int64, from `grid` [images, 3].

    A token stands for merge x merge patches.
    """
    return grid.prod(-1) // merge**2


@lru_cache(maxsize=8)
def reader_of(model: str) -> ImageReader:
    """Return the reader of a model. It is made once in a process."""
    return ImageReader(model)
