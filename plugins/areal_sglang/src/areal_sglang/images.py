"""Options of SGLang servers of a VLM (`sglang/srt/multimodal/processors/qwen_vl.py` of SGLang)."""

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
"""First version that inserts images without changing the other token ids."""

PATCHES_MB = 256
"""Size in MB of the cache of patches. With 0, SGLang decodes a Qwen2-VL prompt to text and tokenizes it again."""

ENVIRONMENT: Mapping[str, str] = MappingProxyType({"SGLANG_VLM_CACHE_SIZE_MB": "0"})
"""Switches off the cache of image embeddings: SGLang would use those of the old weights after an update."""


def options_for(model: str) -> dict[str, OptionValue]:
    """Return the options of a server. They bind image sizes to those of the model's folder, not to SGLang's own."""
    options: dict[str, OptionValue] = {"mm_preprocess_cache_size_mb": PATCHES_MB}
    processor: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):  # the second file has precedence
        if (file := Path(model) / name).is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            processor |= content.get("image_processor", {}) if name.startswith("processor") else content
    size = processor.get("size") or {}
    shortest = processor.get("min_pixels") or size.get("shortest_edge")
    longest = processor.get("max_pixels") or size.get("longest_edge")
    if shortest and longest:
        bounds = {"shortest_edge": shortest, "longest_edge": longest}
        options["mm_process_config"] = json.dumps({"image": {"size": bounds}})
    return options


def collapsed(prompt: Prompt) -> Sequence[int]:
    """Return the ids with one image token for each image, which SGLang repeats."""
    if not prompt.places:
        return prompt.input_ids
    repeated = {position for begin, count in prompt.places for position in range(begin + 1, begin + count)}
    return [token for position, token in enumerate(prompt.input_ids) if position not in repeated]


def check_server(version: Version, info: Mapping[str, Any]) -> None:
    """Check by `/server_info` that a server keeps token ids.

    Raises:
        ServerRefusedError: it would decode a prompt with images to text and tokenize it again.
    """
    if version < SINCE or not info.get("mm_preprocess_cache_size_mb"):
        raise ServerRefusedError(
            f"is SGLang {version} and has a VLM: that needs {SINCE} or later, started with "
            f"--mm-preprocess-cache-size-mb {PATCHES_MB} and SGLANG_VLM_CACHE_SIZE_MB=0"
        )
