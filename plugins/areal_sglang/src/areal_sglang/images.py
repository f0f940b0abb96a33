"""How SGLang is started for a VLM: `sglang/srt/multimodal/processors/qwen_vl.py` of SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from areal_core.servers import ServerRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.models import Prompt
    from areal_core.servers import OptionValue

SINCE = Version("0.5.23")
"""From here on images are put between token ids that stay as they are."""

PATCHES_MB = 256
"""Patches that a server keeps. Without any, SGLang puts images of Qwen2-VL into text, and makes the ids anew."""

ENVIRONMENT: Mapping[str, str] = MappingProxyType({"SGLANG_VLM_CACHE_SIZE_MB": "0"})
"""Embeddings of images are not kept: SGLang would use those of former weights after an update."""


def options_for(model: str) -> dict[str, OptionValue]:
    """Of a server; sizes of images are bound as the folder says, for SGLang has bounds of its own for Qwen2-VL."""
    options: dict[str, OptionValue] = {"mm_preprocess_cache_size_mb": PATCHES_MB}
    told: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):  # the second counts where both are there
        if (file := Path(model) / name).is_file():
            read = json.loads(file.read_text(encoding="utf-8"))
            told |= read.get("image_processor", {}) if name.startswith("processor") else read
    size = told.get("size") or {}
    shortest = told.get("min_pixels") or size.get("shortest_edge")
    longest = told.get("max_pixels") or size.get("longest_edge")
    if shortest and longest:
        bounds = {"shortest_edge": shortest, "longest_edge": longest}
        options["mm_process_config"] = json.dumps({"image": {"size": bounds}})
    return options


def collapsed(prompt: Prompt) -> Sequence[int]:
    """The ids with one image token for each image, which SGLang repeats itself."""
    if not prompt.places:
        return prompt.input_ids
    spare = {place for begin, count in prompt.places for place in range(begin + 1, begin + count)}
    return [token for place, token in enumerate(prompt.input_ids) if place not in spare]


def check_server(version: Version, told: Mapping[str, Any]) -> None:
    """Raise ServerRefusedError where a server, from its `/server_info`, would put images into text."""
    if version < SINCE or not told.get("mm_preprocess_cache_size_mb"):
        raise ServerRefusedError(
            f"is SGLang {version} and has a VLM: that needs {SINCE} or later, started with "
            f"--mm-preprocess-cache-size-mb {PATCHES_MB} and SGLANG_VLM_CACHE_SIZE_MB=0"
        )
