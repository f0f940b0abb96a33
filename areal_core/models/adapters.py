"""LoRA adapters in PEFT's format, which servers read from a folder of synced weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path


def describe_adapter(folder: Path) -> bool:
    """Write PEFT's description into a folder of synced weights that holds an adapter.

    Returns:
        Whether the folder holds an adapter. Nothing is written into one that holds a model.

    Raises:
        OSError: the folder cannot be read or written.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from areal_core.models import describe_adapter
        >>> from safetensors.numpy import save_file
        >>> matrices = {f"model.q_proj.lora_{side}.weight": np.zeros((4, 4), np.float32) for side in "AB"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(matrices, Path(folder, "model.safetensors"))
        ...     describe_adapter(Path(folder))
        ...     json.loads(Path(folder, "adapter_config.json").read_text())["target_modules"]
        True
        ['q_proj']
    """
    weights = folder / "model.safetensors"
    if not weights.is_file():  # a model in several files
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
    config_file = folder / "adapter_config.json"
    if not config_file.exists():  # write it once: another server may be reading it
        temporary = config_file.with_suffix(".new")
        temporary.write_text(json.dumps(config), encoding="utf-8")
        temporary.rename(config_file)
    return True
