"""The core's health checks of a model. `areal doctor MODEL` asks each function in a process of its own."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from areal_core.checks.models import has_tokenizer_files
from areal_core.disk import read_shapes, weight_files
from areal_core.errors import RunError
from areal_core.models.quantization import DEQUANTIZED, plain_shapes, quantization_of
from areal_core.models.sizes import text_config
from areal_core.plugins import Finding

if TYPE_CHECKING:
    from pathlib import Path

_GIB: Final = 1 << 30
_CONTEXTS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
"""Keys of config.json with the longest sequence in tokens."""


def check_model(folder: Path) -> Finding:
    """Report type, architecture, context and quantization from config.json."""
    config = _read(folder / "config.json")
    text = text_config(config)
    context = next((text[name] for name in _CONTEXTS if text.get(name)), None)
    quantization = quantization_of(config)
    parts = [
        config["model_type"],
        f"architecture {', '.join(config.get('architectures') or ['not named'])}",
        f"context {context:,} tokens" if isinstance(context, int) else "context not limited by its config",
        f"quantized by {quantization}" if quantization else "not quantized",
    ]
    if code := config.get("auto_map"):
        return Finding(
            False,
            f"{'; '.join(parts)}; it needs code of its own ({', '.join(sorted(code))}), which areal doctor does not "
            "run: set model.trust_remote_code, and the run tries it at setup",
        )
    return Finding(True, "; ".join(parts))


def check_weights(folder: Path) -> Finding:
    """Report the parameters and their memory, from the headers of the files or from their index."""
    description = _read(folder / "config.json")
    method = quantization_of(description)
    try:
        shapes = read_shapes(folder)
    except RunError as error:
        index = folder / "model.safetensors.index.json"
        size = _read(index).get("metadata", {}).get("total_size") if index.is_file() else None
        if not isinstance(size, int | float):
            return Finding(not any(folder.glob("*.safetensors")), error.message)
        return Finding(True, f"{size / _GIB:,.1f} GiB in its files, which are not here")
    if method and method not in DEQUANTIZED:
        size = sum(file.stat().st_size for file in weight_files(folder))
        return Finding(True, f"{size / _GIB:,.2f} GiB in its files, packed by {method}")
    count = sum(map(math.prod, plain_shapes(description, shapes).values()))
    half, full = (count * size / _GIB for size in (2, 16))
    return Finding(
        True,
        f"{_as_text(count)} parameters: {half:,.2f} GiB in bfloat16; training holds {full:,.2f} GiB of float32 "
        "parameters, gradients and moments, over all ranks, before activations",
    )


def _as_text(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.3g} M"


def check_tokenizer(folder: Path) -> Finding:
    """Report whether there are tokenizer files, and where the chat template is."""
    if not has_tokenizer_files(folder):
        return Finding(False, "there are no tokenizer files: save one there with save_pretrained")
    config = folder / "tokenizer_config.json"
    if config.is_file() and _read(config).get("chat_template"):
        return Finding(True, f"with a chat template, in {config.name}")
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return Finding(True, f"with a chat template, in {name}")
    return Finding(True, "without a chat template: prompts are text")


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
