"""A folder of synced weights that holds an adapter alone, as servers that read PEFT's format take it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path


def describe_adapter(folder: Path) -> bool:
    """Make a folder of synced weights one that PEFT's readers know.

    Returns:
        Whether it holds an adapter, and not a model.

    Raises:
        OSError: it holds neither whole, or cannot be written into.
    """
    weights = folder / "model.safetensors"
    if not weights.is_file():  # the run's model, in several files
        return False
    with safe_open(weights, "np") as file:
        names = [name for name in file.keys() if ".lora_A." in name]  # noqa: SIM118
        ranks = {name: file.get_slice(name).get_shape()[0] for name in names}
    if not ranks:
        return False
    rank = max(ranks.values())
    modules = sorted({name.split(".")[-3] for name in ranks})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    link = folder / "adapter_model.safetensors"
    if not link.exists():
        link.symlink_to(weights.name)
    if not (place := folder / "adapter_config.json").exists():  # once, for servers read it at different times
        fresh = place.with_suffix(".new")
        fresh.write_text(json.dumps(config), encoding="utf-8")
        fresh.rename(place)
    return True
