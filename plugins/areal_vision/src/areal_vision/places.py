"""Place images among the tokens of a model: the ids to embed, and the positions of the rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from areal_core.errors import RunError
from areal_core.models import without_image_tokens
from areal_vision.images import ImageInputs, token_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from areal_core.data import PackedBatch


class Placed(NamedTuple):
    """A sequence with its images, ready for the model.

    Attributes:
        input_ids: [T] int64, ids to embed; see `without_image_tokens`.
        positions: [3, T] int64, positions in time, height and width (multimodal rotary embeddings, arXiv 2409.12191).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor

    @property
    def offset(self) -> int:
        """Position of the next token minus its index in the sequence."""
        return int(self.positions.max()) + 1 - len(self.input_ids)


class Seen(NamedTuple):
    """A batch of sequences with images, ready for the model.

    Attributes:
        input_ids: ids to embed of all sequences, concatenated; see `Placed`.
        positions: positions of all sequences, concatenated; see `Placed`.
        images: keyword arguments of the model's `forward` for the images; empty without images.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    images: dict[str, torch.Tensor]


def shown(images: Sequence[ImageInputs], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a model's `forward` for images, in order; empty without images."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([inputs.pixels for inputs in images]).to(device, dtype),
        "image_grid_thw": torch.cat([inputs.grid for inputs in images]).to(device),
    }


def _runs(is_image: torch.Tensor) -> list[int]:
    """Return the lengths of the runs of True in [T] bool."""
    edges = torch.nn.functional.pad(is_image.to(torch.int8), (1, 1)).diff().nonzero()[:, 0]
    return (edges[1::2] - edges[::2]).tolist()


class VisionTokens:
    """Handles the image tokens of a vision-language model.

    The image tokens of a sequence belong to its images, from the first on. A policy may sample further image tokens,
    and video tokens; the model embeds these as padding, because they have no image. Generation and training do the
    same, so that their log-probabilities agree.

    Args:
        model: model of one of Qwen's families.

    Attributes:
        image: id of the image token.
        merge: number of patches along each side of the square that one image token stands for.

    Raises:
        RunError: the model is another kind of vision-language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._model: Any = model.base_model
        image = getattr(config, "image_token_id", None)
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        if image is None or merge is None or not hasattr(self._model, "get_rope_index"):
            raise RunError(
                f"model type '{config.model_type}' is a vision-language model that areal does not support",
                hints=["choose a model of Qwen's families: Qwen2-VL, Qwen2.5-VL, Qwen3-VL"],
            )
        self._config = config
        self.image, self.merge = int(image), int(merge)

    def place(self, input_ids: torch.Tensor, grid: torch.Tensor) -> Placed:
        """Place images in one sequence.

        Args:
            input_ids: [T] int64.
            grid: [images, 3] int64, in the order of the images.

        Raises:
            ValueError: the sequence does not have a run of image tokens of the right length for each image.
        """
        counts = token_counts(grid, self.merge).tolist()
        is_image_token: torch.Tensor = torch.eq(input_ids, self.image)
        is_image = is_image_token & (is_image_token.cumsum(0) <= sum(counts))
        run_lengths = _runs(is_image)
        if run_lengths != counts:
            raise ValueError(
                f"the images need image tokens in runs of {counts}, but the sequence has runs of {run_lengths}: each "
                "image needs its own run, with a text token between two runs"
            )
        model_ids = torch.where(is_image, input_ids, without_image_tokens(self._config, input_ids))
        kinds = is_image.to(torch.int32)
        grids = grid if len(grid) else None
        positions, _ = self._model.get_rope_index(model_ids[None], kinds[None], image_grid_thw=grids)
        return Placed(model_ids, positions[:, 0])

    def place_rows(self, input_ids: torch.Tensor, images: Sequence[ImageInputs | None]) -> tuple[torch.Tensor, ...]:
        """Place images in the rows of input_ids [B, T]. Return the ids to embed, [B, T], and positions, [3, B, T]."""
        no_grid = input_ids.new_zeros(0, 3)
        placed = [
            self.place(ids, no_grid if inputs is None else inputs.grid.to(ids.device))
            for ids, inputs in zip(input_ids, images, strict=True)
        ]
        return torch.stack([row.input_ids for row in placed]), torch.stack([row.positions for row in placed], 1)

    def shown(self, images: Sequence[ImageInputs | None]) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model's `forward` for the images of several rows."""
        present = [inputs for inputs in images if inputs is not None]
        return shown(present, self._model.device, self._model.dtype)

    def unseen(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return 0, computed from all parameters of the vision tower, so that each of them gets a gradient.

        Ranks that sum gradients need one for each parameter, even if their batch has no images.
        """
        patches, config = self.merge**2, self._model.config.vision_config
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(patches, values, device=device, dtype=dtype)
        grid = torch.tensor([[1, self.merge, self.merge]], device=device)
        output = self._model.get_image_features(pixels, grid)
        features = tree_leaves((output.pooler_output, getattr(output, "deepstack_features", None)))
        return sum((0.0 * feature.sum() for feature in features if feature is not None), pixels.new_zeros(()))

    def see(self, batch: PackedBatch, device: torch.device, dtype: torch.dtype) -> Seen:
        """Return the sequences of a batch, ready for the model.

        The images are the batch's multimodal fields `patches` and `images`. It may have none.

        Raises:
            RunError: the images do not match the image tokens.
        """
        ids = torch.split(batch["input_ids"].cpu(), batch.lengths.tolist())
        images = batch.multimodal.get("images")
        no_grid = torch.zeros(0, 3, dtype=torch.int64)
        grids = [no_grid] * len(batch) if images is None else [row["grid"].cpu() for row in images.rows()]
        try:
            placed = [self.place(*arguments) for arguments in zip(ids, grids, strict=True)]
        except ValueError as error:
            raise RunError(f"the batch cannot be trained on: {error}") from error
        image_inputs = []
        if images is not None and int(images.lengths.sum()):
            image_inputs.append(ImageInputs(batch["pixels"], torch.cat(grids)))
        input_ids = torch.cat([sequence.input_ids for sequence in placed])
        positions = torch.cat([sequence.positions for sequence in placed], 1)
        return Seen(input_ids.to(device), positions.to(device), shown(image_inputs, device, dtype))

    def hidden(self, seen: Seen, for_layers: Mapping[str, Any]) -> torch.Tensor:
        """Return the model's hidden states, [T, hidden size].

        Args:
            seen: sequences from `see`.
            for_layers: keyword arguments for the layers, such as where packed sequences begin.
        """
        hidden: torch.Tensor = self._model(
            input_ids=seen.input_ids.unsqueeze(0),
            position_ids=seen.positions.unsqueeze(1),
            use_cache=False,
            **for_layers,
            **seen.images,
        )[0][0]
        if not seen.images and torch.is_grad_enabled():
            hidden = hidden + self.unseen(hidden.device, hidden.dtype)
        return hidden
