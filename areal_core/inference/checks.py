"""Checks before a server is used: that it serves the run's model, and that new weights fit this model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.inference.errors import ServerRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.inference.adapter import ServerIdentity
    from areal_core.interfaces.model import ModelReference

_COMPARED_KEYS = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
)
_SHOWN_NAMES = 3
"""Number of tensors that an error names for each kind of difference."""


def check_identity(identity: ServerIdentity, model: ModelReference) -> None:
    """Check that a server serves the run's model.

    Raises:
        ServerRefusedError: it serves another model, or in another dtype, or its model's folder cannot be read.
    """
    if identity.dtype and identity.dtype != model.dtype:
        raise ServerRefusedError(
            f"computes in {identity.dtype}, and the run in {model.dtype}: start it with --dtype {model.dtype}"
        )
    path = Path(identity.model) / "config.json"
    if not path.is_file():
        return  # it is on another machine; the log-probability check compares it with the trainer's model
    try:
        served = _shape_keys(path)
        expected = _shape_keys(Path(model.path) / "config.json")
    except (OSError, ValueError) as error:
        raise ServerRefusedError(f"serves {identity.model}, which cannot be compared: {error}") from None
    differences = [
        f"{key} {served.get(key)} instead of {expected.get(key)}"
        for key in _COMPARED_KEYS
        if served.get(key) != expected.get(key)
    ]
    if differences:
        raise ServerRefusedError(f"serves another model, {identity.model}: {', '.join(differences)}")


def check_fit(shapes: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]], *, is_tied: bool) -> None:
    """Check that weights are those of a model, by the names and shapes of their tensors.

    Args:
        shapes: shapes of the weights' tensors, by name.
        model: shapes of the model's tensors, by name.
        is_tied: whether the model's head is its embeddings. Then the head may be missing on either side.

    Raises:
        RunError: tensors are missing, have another shape, or are not the model's.
    """
    tied = {name for name in shapes.keys() ^ model.keys() if is_tied and name.endswith("lm_head.weight")}
    names_by_fault = {
        "missing": sorted(model.keys() - shapes.keys() - tied),
        "unexpected": sorted(shapes.keys() - model.keys() - tied),
        "of another shape": sorted(
            name for name in shapes.keys() & model.keys() if tuple(shapes[name]) != tuple(model[name])
        ),
    }
    problems = []
    for fault, names in names_by_fault.items():
        if names:
            hidden = len(names) - _SHOWN_NAMES
            more = f" and {hidden} more" if hidden > 0 else ""
            problems.append(f"{fault}: {', '.join(names[:_SHOWN_NAMES])}{more}")
    if problems:
        raise RunError(f"the weights do not fit the model that is served; {'; '.join(problems)}")


def _shape_keys(config: Path) -> dict[str, object]:
    """Return the keys of a config.json, those of a VLM's language model included."""
    description = json.loads(config.read_text())
    return {**(description.get("text_config") or {}), **description}
