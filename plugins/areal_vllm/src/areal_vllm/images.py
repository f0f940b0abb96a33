"""Images in vLLM's form: `vllm/entrypoints/scale_out/token_in_token_out` and `vllm/v1/serial_utils.py`.

A request contains the position and the patches of each image. The model's own image processor makes the patches, as in
the trainer. So token ids and positions stay those of the request, and a server decodes neither text nor image files.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from functools import lru_cache
from hashlib import sha256
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from areal_core.plugins import extra_module
from areal_core.servers import ServerRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from areal_core.engines import ModelReference
    from areal_core.servers import OptionValue

OPTIONS: Mapping[str, OptionValue] = MappingProxyType(
    {
        "limit_mm_per_prompt": '{"video": 0}',  # otherwise vLLM reserves memory for a video
        "mm_processor_cache_gb": 0,  # requests contain the patches
        "no_mm_device_do_normalize": True,  # the patches are normalized
    }
)
"""Options of a server of a VLM."""

_RAW = 3
"""Code of a tensor's bytes in vLLM's msgpack."""
CACHED_REQUESTS = 16
"""Requests whose patches are cached. Requests of a group follow each other."""


def check_settings(config: Mapping[str, Any]) -> None:
    """Check by `vllm_config` that a server takes images as `OPTIONS` demand.

    Raises:
        ServerRefusedError: it prepares images itself.
    """
    settings = config["model_config"].get("multimodal_config") or {}
    if settings.get("mm_device_do_normalize") is not False or settings.get("mm_processor_cache_gb") != 0:
        raise ServerRefusedError(
            "prepares images itself: start it with --no-mm-device-do-normalize --mm-processor-cache-gb 0"
        )


class Item(NamedTuple):
    """One image.

    Attributes:
        name: digest of the image file.
        tokens: number of image tokens.
        data: patches and grid, encoded for vLLM.
    """

    name: str
    tokens: int
    data: str


class PatchEncoder:
    """Cuts images into patches and encodes them for vLLM.

    Args:
        model: the VLM. Its image processor is loaded for the first request with images.
    """

    def __init__(self, model: ModelReference) -> None:
        self._model = model
        self._lock = Lock()
        self._items = lru_cache(maxsize=CACHED_REQUESTS)(self._read)

    def features(self, images: tuple[str, ...], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return `features` of a request. Call this in a thread: the image processor may take long.

        Args:
            images: image files in base64.
            places: position of the first image token and number of image tokens, for each image.

        Raises:
            ValueError: a file cannot be read, an image has another number of image tokens, or the model's folder has
                no image processor.
        """
        with self._lock:  # concurrent requests of a group process their images only once
            items = self._items(images)
        needed, actual = [item.tokens for item in items], [count for _, count in places]
        if needed != actual:
            raise ValueError(f"the request needs image tokens in runs of {needed}, but has runs of {actual}")
        return {
            "mm_hashes": {"image": [item.name for item in items]},
            "mm_placeholders": {"image": [{"offset": begin, "length": count} for begin, count in places]},
            "kwargs_data": {"image": [item.data for item in items]},
        }

    def _read(self, images: tuple[str, ...]) -> list[Item]:
        import torch

        reader_of = extra_module("areal_vision.images", "vllm", "vision").reader_of
        reader, files = reader_of(self._model.path), [b64decode(image) for image in images]
        batch = reader.read(files)
        patches = torch.split(batch.pixels.to(getattr(torch, self._model.dtype)), batch.grid.prod(-1).tolist())
        counts = reader.counts(batch.grid)
        return [
            Item(sha256(file).hexdigest(), count, _encoded_item(pixels, grid))
            for file, count, pixels, grid in zip(files, counts, patches, batch.grid, strict=True)
        ]


def _encoded_item(pixels: torch.Tensor, grid: torch.Tensor) -> str:
    """Return an image's `MultiModalKwargsItem` in base64, from pixels [patches, values] and grid [3] int64."""
    flat = {"slices": [[0, len(pixels), None]], "dim": 0, "keep_on_cpu": False}
    fields = {
        "pixel_values": {"data": _encoded_tensor(pixels), "field": ["flat", flat]},
        "image_grid_thw": {"data": _encoded_tensor(grid), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return b64encode(msgpack.packb(fields)).decode()


def _encoded_tensor(tensor: torch.Tensor) -> list[Any]:
    import torch

    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), msgpack.ExtType(_RAW, data)]
