"""Images as vLLM is shown them: `vllm/entrypoints/scale_out/token_in_token_out` and `vllm/v1/serial_utils.py`.

A request says where each image stands and brings its patches, cut by the model's own image processor as the trainer
does it: token ids and places stay those of the request, and a server looks at neither text nor files.
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
        "limit_mm_per_prompt": '{"video": 0}',  # else room is kept for one
        "mm_processor_cache_gb": 0,  # patches come with each request
        "no_mm_device_do_normalize": True,  # they are normalized already
    }
)
"""Of a server whose model sees."""

_RAW = 3
"""The code of vLLM's msgpack for the bytes of a tensor."""
REMEMBERED = 16
"""Requests whose patches are kept: siblings of a group come one behind another."""


def check_settings(told: Mapping[str, Any]) -> None:
    """Raise ServerRefusedError where a server, from its `vllm_config`, takes images in another way than `OPTIONS`."""
    found = told["model_config"].get("multimodal_config") or {}
    if found.get("mm_device_do_normalize") is not False or found.get("mm_processor_cache_gb") != 0:
        raise ServerRefusedError(
            "prepares images in its own way: start it with --no-mm-device-do-normalize --mm-processor-cache-gb 0"
        )


class Item(NamedTuple):
    """One image.

    Attributes:
        name: the digest of its file.
        tokens: how many image tokens it needs.
        data: patches and grid, as vLLM reads them.
    """

    name: str
    tokens: int
    data: str


class PatchEncoder:
    """Cuts images into patches and writes them down.

    Args:
        model: that sees; its image processor is loaded by the first request that has images.
    """

    def __init__(self, model: ModelReference) -> None:
        self._model = model
        self._lock = Lock()
        self._items = lru_cache(maxsize=REMEMBERED)(self._read)

    def features(self, images: tuple[str, ...], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """What `features` of a request holds. Takes as long as the image processor does: call it in a thread.

        Args:
            images: files in base64.
            places: of each, where its image tokens begin and how many they are.

        Raises:
            ValueError: a file cannot be read, or has another number of image tokens, or the model's folder has no image
                processor.
        """
        with self._lock:  # siblings come at once: one of them reads
            items = self._items(images)
        wanted, found = [item.tokens for item in items], [count for _, count in places]
        if wanted != found:
            raise ValueError(f"the request needs image tokens in runs of {wanted}, and has runs of {found}")
        return {
            "mm_hashes": {"image": [item.name for item in items]},
            "mm_placeholders": {"image": [{"offset": begin, "length": count} for begin, count in places]},
            "kwargs_data": {"image": [item.data for item in items]},
        }

    def _read(self, images: tuple[str, ...]) -> list[Item]:
        import torch

        reader_of = extra_module("areal_vision.images", "vllm", "vision").reader_of
        reader, files = reader_of(self._model.path), [b64decode(image) for image in images]
        seen = reader.read(files)
        patches = torch.split(seen.pixels.to(getattr(torch, self._model.dtype)), seen.grid.prod(-1).tolist())
        counts = reader.counts(seen.grid)
        return [
            Item(sha256(file).hexdigest(), count, _written(pixels, grid))
            for file, count, pixels, grid in zip(files, counts, patches, seen.grid, strict=True)
        ]


def _written(pixels: torch.Tensor, grid: torch.Tensor) -> str:
    """One image's `MultiModalKwargsItem`: pixels [patches, values], grid [3] int64."""
    flat = {"slices": [[0, len(pixels), None]], "dim": 0, "keep_on_cpu": False}
    fields = {
        "pixel_values": {"data": _tensor(pixels), "field": ["flat", flat]},
        "image_grid_thw": {"data": _tensor(grid), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return b64encode(msgpack.packb(fields)).decode()


def _tensor(tensor: torch.Tensor) -> list[Any]:
    import torch

    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), msgpack.ExtType(_RAW, data)]
