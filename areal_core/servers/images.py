"""What text has to know of VLMs: which models are, and where images stand among the token ids of a prompt.

Imports no torch. The rest is in areal-vision, which is imported for a VLM alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images stand among tokens in the way that is known here."""


def sees_images(config: object) -> bool:
    """Whether a model of this config of Hugging Face is a VLM."""
    return getattr(config, "vision_config", None) is not None


def set_attention(model: Any, name: str) -> None:
    """Let the decoder's layers of a Hugging Face model use an attention; those of a vision tower have PyTorch's."""
    tower = "eager" if name == "eager" else "sdpa"
    model.set_attn_implementation({"": name, "text_config": name, "vision_config": tower})


class Prompt(NamedTuple):
    """Token ids and their images.

    Attributes:
        input_ids: each image's image tokens in full; image and video tokens that stand for no image are padding.
        places: of each image, where its image tokens begin and how many they are.
    """

    input_ids: Sequence[int]
    places: list[tuple[int, int]]


class ImagePrompts:
    """Puts images into the prompts of one model.

    A policy may write image and video tokens by itself. Nothing stands behind them, and they are fed as padding, as in
    training and in the embedded engine: a server is told to stop at one, and goes on behind padding in its place.

    Args:
        model: its folder; a name that is no folder is a model that sees nothing.

    Attributes:
        sees: whether the model is shown images.
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
        """Find the images of a sequence: they are its first runs of image tokens.

        Args:
            input_ids: prompt and everything after it so far.
            images: how many it has.

        Raises:
            ValueError: the model sees none, or they are not there.
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
        """The tokens at which a server stops: those that the request names, and image and video tokens."""
        return [*named, *(token for token in self._reserved if token not in named)]

    def is_written(self, output_ids: Sequence[int], named: Sequence[int], *, can_go_on: bool) -> bool:
        """Whether what was generated has ended with an image or video token that is no stop token of the request.

        Args:
            output_ids: so far.
            named: the request's own stop tokens.
            can_go_on: whether the rest may be asked for as a request of its own.

        Raises:
            ValueError: it has, and cannot go on.
        """
        if not output_ids or output_ids[-1] not in self._reserved or output_ids[-1] in named:
            return False
        if not can_go_on:
            raise ValueError(
                f"the policy wrote token {output_ids[-1]}, of an image or a video, behind which a server goes on as "
                "with a new request; stop texts and penalties look at what was generated before: leave them out"
            )
        return True


def _runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """Begin and end of each run of a token."""
    places = (place for place, found in enumerate(ids) if found == token)
    runs: list[tuple[int, int]] = []
    for place in places:
        begin = runs.pop()[0] if runs and runs[-1][1] == place else place
        runs.append((begin, place + 1))
    return runs
