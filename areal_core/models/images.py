"""VLMs, as far as code for text must know them: which models are VLMs, and where images are among the tokens.

The rest is in areal-vision, which is imported only for a VLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types of VLMs whose image tokens are known here."""


def is_vlm(config: object) -> bool:
    """Return whether a model with this Hugging Face config is a VLM.

    Example:
        >>> from areal_core.models import is_vlm
        >>> from transformers import Qwen2Config, Qwen2VLConfig
        >>> is_vlm(Qwen2VLConfig()), is_vlm(Qwen2Config())
        (True, False)
    """
    return getattr(config, "vision_config", None) is not None


def auto_class_of(config: Any) -> Any:
    """Return the class of transformers that loads all parts of a model with this config.

    A composite model, whose language model has a config of its own, is loaded with its vision tower and other parts.

    Example:
        >>> from areal_core.models import auto_class_of
        >>> from transformers import Qwen2Config
        >>> auto_class_of(Qwen2Config()).__name__
        'AutoModelForCausalLM'
    """
    import transformers

    if config.get_text_config() is not config and type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForImageTextToText if is_vlm(config) else transformers.AutoModelForCausalLM


def set_attention(model: Any, name: str) -> None:
    """Set the attention of a Hugging Face model's decoder. A vision tower uses PyTorch's, unless `name` is eager.

    Args:
        model: the model.
        name: name of an attention that transformers knows, such as `sdpa`, or one registered with it.

    Example:
        >>> import torch
        >>> from areal_core.models import auto_class_of, set_attention
        >>> from transformers import Qwen2Config
        >>> config = Qwen2Config(num_hidden_layers=1)
        >>> with torch.device("meta"):
        ...     model = auto_class_of(config).from_config(config)
        >>> set_attention(model, "eager")
        >>> model.config._attn_implementation
        'eager'
    """
    tower = "eager" if name == "eager" else "sdpa"
    model.set_attn_implementation({"": name, "text_config": name, "vision_config": tower})


def without_image_tokens(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return token ids as a model gets them when they contain no image.

    A policy may write image and video tokens itself. Models of `FAMILIES` get padding instead; see `ImagePrompts`.

    Args:
        config: the model's Hugging Face config.
        input_ids: token ids of any shape, int64.

    Returns:
        Token ids of the same shape; `input_ids` itself if the model is not of `FAMILIES`.

    Example:
        >>> import torch
        >>> from areal_core.models import without_image_tokens
        >>> from transformers import Qwen2VLConfig
        >>> config = Qwen2VLConfig(image_token_id=7, video_token_id=8)
        >>> without_image_tokens(config, torch.tensor([5, 7, 6, 8])).tolist()
        [5, 0, 6, 0]
    """
    if config.model_type not in FAMILIES:
        return input_ids
    padding = int(config.get_text_config().pad_token_id or 0)
    for kind in ("image", "video"):
        if (token := getattr(config, f"{kind}_token_id", None)) is not None:
            input_ids = input_ids.masked_fill(input_ids == token, padding)
    return input_ids


class Prompt(NamedTuple):
    """Token ids and the positions of their images.

    Attributes:
        input_ids: the tokens, with all image tokens of each image. Image and video tokens without an image are padding.
        places: (first position, number of image tokens) of each image.
    """

    input_ids: Sequence[int]
    places: list[tuple[int, int]]


class ImagePrompts:
    """Finds the images in the prompts of one model.

    A policy may write image and video tokens itself. No image belongs to them, and the model gets padding in their
    place, as in training and in the embedded engine: a server stops at such a token, and continues after padding.

    Args:
        model: the model's folder. A name that is not a folder stands for a model without images.

    Attributes:
        sees: whether the model takes images.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from areal_core.models import FAMILIES, ImagePrompts, Prompt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = {"model_type": "qwen2_vl", "image_token_id": 7, "pad_token_id": 0}
        ...     _ = Path(folder, "config.json").write_text(json.dumps(config))
        ...     prompts = ImagePrompts(folder)
        >>> prompts.sees, config["model_type"] in FAMILIES
        (True, True)
        >>> prompts.place([5, 7, 7, 6, 7], images=1)  # the policy wrote the last 7 itself
        Prompt(input_ids=[5, 7, 7, 6, 0], places=[(1, 2)])
        >>> prompts.place([5, 6], images=0) == Prompt([5, 6], places=[])
        True
    """

    def __init__(self, model: str) -> None:
        file = Path(model) / "config.json"
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._model, self._type = model, config.get("model_type")
        kinds = [config.get(f"{kind}_token_id") for kind in ("image", "video")]
        self.sees = self._type in FAMILIES and kinds[0] is not None
        self._reserved = [int(token) for token in kinds if token is not None] if self.sees else []
        self._padding = int((config | (config.get("text_config") or {})).get("pad_token_id") or 0)

    def place(self, input_ids: Sequence[int], images: int) -> Prompt:
        """Return a sequence with the positions of its images, which are its first runs of image tokens.

        Args:
            input_ids: the prompt and everything after it so far.
            images: number of its images.

        Raises:
            ValueError: the model takes no images, or the sequence has fewer runs of image tokens.
        """
        if not self.sees:
            if images:
                raise ValueError(
                    f"a request has images, and '{self._model}' sees none: its model type is '{self._type}', and "
                    f"images are shown to {', '.join(FAMILIES)}"
                )
            return Prompt(input_ids, [])
        runs = _runs(input_ids, self._reserved[0])
        if len(runs) < images or any(end == len(input_ids) for _, end in runs[:images]):
            raise ValueError(
                f"a request has {images} images, and its {len(input_ids)} tokens have {len(runs)} runs of image "
                "tokens: each image has its own, with a token of text behind it"
            )
        fed = [self._padding if token in self._reserved else token for token in input_ids]
        for begin, end in runs[:images]:
            fed[begin:end] = input_ids[begin:end]
        return Prompt(fed, [(begin, end - begin) for begin, end in runs[:images]])

    def stops(self, named: Sequence[int]) -> list[int]:
        """Return the tokens at which a server stops: the request's own, `named`, and image and video tokens."""
        return [*named, *(token for token in self._reserved if token not in named)]

    def is_written(self, output_ids: Sequence[int], named: Sequence[int], *, is_resumable: bool) -> bool:
        """Return whether the answer has stopped at an image or video token that is not a stop token of the request.

        Args:
            output_ids: the answer so far.
            named: the request's own stop tokens.
            is_resumable: whether the answer can continue as a new request.

        Raises:
            ValueError: it has stopped there, and cannot continue.
        """
        if not output_ids or output_ids[-1] not in self._reserved or output_ids[-1] in named:
            return False
        if not is_resumable:
            raise ValueError(
                f"the policy wrote token {output_ids[-1]}, of an image or a video, behind which a server goes on as "
                "with a new request; stop texts and penalties look at what was generated before: leave them out"
            )
        return True


def _runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """Return (first position, position after the last) of each run of a token."""
    runs: list[tuple[int, int]] = []
    for position, candidate in enumerate(ids):
        if candidate != token:
            continue
        begin = runs.pop()[0] if runs and runs[-1][1] == position else position
        runs.append((begin, position + 1))
    return runs
