"""Loads the tokenizers of a run's models, and their weights by name and shape, in the preflight child.

Engines and workers load both at setup. What they would refuse there is reported before the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.checks.models import has_tokenizer_files
from areal_core.config.needs import roles_of
from areal_core.disk import is_folder, read_shapes
from areal_core.errors import RunError
from areal_core.interfaces.model import ModelReference
from areal_core.models.fit import check_weights_fit
from areal_core.models.quantization import refuse_quantized
from areal_core.runs.models import check_same_tokens, load_tokenizer, model_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.config import Resolved


def local_models(resolved: Resolved) -> dict[str, ModelReference]:
    """Return the models of a config that are on this machine, by the config key that names each."""
    section = resolved.config.model
    folders = {key: resolved.base_dir / path for key, path in model_paths(resolved.config).items()}
    return {
        key: ModelReference(str(folder), section.dtype, section.trust_remote_code)
        for key, folder in folders.items()
        if is_folder(folder)
    }


def tokenizer_of(resolved: Resolved) -> Any:
    """Return the tokenizer of the run's model; None if the model is not on this machine, or has no tokenizer files.

    Raises:
        RunError: the tokenizer cannot be loaded.
    """
    model = local_models(resolved).get("model.path")
    return load_tokenizer(model) if model is not None and has_tokenizer_files(Path(model.path)) else None


def loading_problems(resolved: Resolved) -> Iterator[str]:
    """Yield why models cannot be loaded: weights that do not fit config.json, tokens that differ between roles.

    Models whose headers or config.json are refused by the driver's own check are left out.
    """
    config, models = resolved.config, local_models(resolved)
    roles = roles_of(config.algorithm, config.training.updates)
    checked = set()
    for name, role in roles.items():
        key = f"roles.{name}.path" if f"roles.{name}.path" in models else "model.path"
        model = models.get(key)
        if model is None or (key, role.head) in checked:
            continue
        checked.add((key, role.head))
        try:
            _check_weights(model, scalar=role.head == "scalar")
            if key != "model.path" and "model.path" in models:
                check_same_tokens(models["model.path"], name, model)
        except RunError as error:
            yield f"{key}: {'; '.join((error.message, *error.hints))}"


def _check_weights(model: ModelReference, *, scalar: bool) -> None:
    folder = Path(model.path)
    try:
        shapes = read_shapes(folder)
        refuse_quantized(model.path, json.loads((folder / "config.json").read_text()), shapes)
    except (RunError, OSError, ValueError):
        return
    check_weights_fit(folder, shapes, scalar=scalar, trust_remote_code=model.trust_remote_code)
