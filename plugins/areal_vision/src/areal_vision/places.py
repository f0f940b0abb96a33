"""Where images stand among the tokens of a model: what it is fed there, and the positions of its rotary embedding."""

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
    """A sequence, ready for the model.

    Attributes:
        input_ids: [T] int64, what is embedded: see `without_image_tokens`.
        positions: [3, T] int64, in time, height and width (multimodal rotary embeddings, arXiv 2409.12191).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor

    @property
    def offset(self) -> int:
        """What a token behind the sequence has as its position, beside how many there are before it."""
        return int(self.positions.max()) + 1 - len(self.input_ids)


class Seen(NamedTuple):
    """A batch of sequences with images, ready for the model.

    Attributes:
        input_ids, positions: see `Placed`; of all sequences, one behind another.
        images: what the model's `forward` takes of the images, by name; empty where there are none.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    images: dict[str, torch.Tensor]


def shown(images: Sequence[ImageInputs], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a model's `forward` takes of images, in the order of their places; nothing where there are none."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([each.pixels for each in images]).to(device, dtype),
        "image_grid_thw": torch.cat([each.grid for each in images]).to(device),
    }


def _runs(places: torch.Tensor) -> list[int]:
    """How long each run of True in [T] bool is."""
    edges = torch.nn.functional.pad(places.to(torch.int8), (1, 1)).diff().nonzero()[:, 0]
    return (edges[1::2] - edges[::2]).tolist()


class VisionTokens:
    """What a vision-language model does with its image tokens.

    The image tokens of a sequence stand for its images, from the first on. Image tokens beyond these, and video
    tokens, which a policy may write, are fed as padding: nothing stands behind them. Generation and training do the
    same, so that log-probabilities agree.

    Args:
        model: of Qwen's families.

    Raises:
        RunError: the model is a VLM in another way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._model: Any = model.base_model
        image = getattr(config, "image_token_id", None)
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        if image is None or merge is None or not hasattr(self._model, "get_rope_index"):
            raise RunError(
                f"model type '{config.model_type}' sees images in a way that is not known here",
                hints=["choose a model of Qwen's families: Qwen2-VL, Qwen2.5-VL, Qwen3-VL"],
            )
        self._config = config
        self.image, self.merge = int(image), int(merge)

    def place(self, input_ids: torch.Tensor, grid: torch.Tensor) -> Placed:
        """Place images in one sequence.

        Args:
            input_ids: [T] int64.
            grid: [images, 3] int64, in the order of their places.

        Raises:
            ValueError: the images' image tokens are not there.
        """
        counts = token_counts(grid, self.merge).tolist()
        is_image: torch.Tensor = torch.eq(input_ids, self.image)
        places = is_image & (is_image.cumsum(0) <= sum(counts))
        if (found := _runs(places)) != counts:
            raise ValueError(
                f"the images need image tokens in runs of {counts}, and the sequence has runs of {found}: each "
                "image has its own, with a token of text between two"
            )
        fed, kinds = (
            torch.where(places, input_ids, without_image_tokens(self._config, input_ids)),
            places.to(torch.int32),
        )
        grids = grid if len(grid) else None
        positions, _ = self._model.get_rope_index(fed[None], kinds[None], image_grid_thw=grids)
        return Placed(fed, positions[:, 0])

    def place_rows(self, input_ids: torch.Tensor, images: Sequence[ImageInputs | None]) -> tuple[torch.Tensor, ...]:
        """Place images in the rows of input_ids [B, T]: what is fed, [B, T], and positions, [3, B, T]."""
        none = input_ids.new_zeros(0, 3)
        placed = [
            self.place(ids, none if each is None else each.grid.to(ids.device))
            for ids, each in zip(input_ids, images, strict=True)
        ]
        return torch.stack([each.input_ids for each in placed]), torch.stack([each.positions for each in placed], 1)

    def shown(self, images: Sequence[ImageInputs | None]) -> dict[str, torch.Tensor]:
        """What the model's `forward` takes of the images of some rows."""
        found = [each for each in images if each is not None]
        return shown(found, self._model.device, self._model.dtype)

    def unseen(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """0, from all parameters of the vision tower: where ranks sum gradients, each has to have some."""
        patches, config = self.merge**2, self._model.config.vision_config
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        shown = torch.zeros(patches, values, device=device, dtype=dtype)
        grid = torch.tensor([[1, self.merge, self.merge]], device=device)
        found = self._model.get_image_features(shown, grid)
        features = tree_leaves((found.pooler_output, getattr(found, "deepstack_features", None)))
        return sum((0.0 * feature.sum() for feature in features if feature is not None), shown.new_zeros(()))

    def see(self, batch: PackedBatch, device: torch.device, dtype: torch.dtype) -> Seen:
        """The sequences of a batch, whose images are its multimodal fields `patches` and `images`; it may have none.

        Raises:
            RunError: the images do not fit the tokens.
        """
        ids = torch.split(batch["input_ids"].cpu(), batch.lengths.tolist())
        images = batch.multimodal.get("images")
        none = torch.zeros(0, 3, dtype=torch.int64)
        grids = [none] * len(batch) if images is None else [row["grid"].cpu() for row in images.rows()]
        try:
            placed = [self.place(*each) for each in zip(ids, grids, strict=True)]
        except ValueError as error:
            raise RunError(f"the batch cannot be trained on: {error}") from error
        seen = (
            [ImageInputs(batch["pixels"], torch.cat(grids))] if images is not None and int(images.lengths.sum()) else []
        )
        fed = torch.cat([each.input_ids for each in placed])
        positions = torch.cat([each.positions for each in placed], 1)
        return Seen(fed.to(device), positions.to(device), shown(seen, device, dtype))

    def hidden(self, seen: Seen, for_layers: Mapping[str, Any]) -> torch.Tensor:
        """The model's hidden states, [T, hidden size].

        Args:
            seen: the sequences.
            for_layers: what the model hands down to its layers: where packed sequences begin.
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
