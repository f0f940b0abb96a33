"""What is refused before a server is bothered with it: weights that do not fit, and servers that are not the run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.servers.errors import ServerRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces import ModelReference
    from areal_core.servers.interface import ServerIdentity

_SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")


def check_identity(identity: ServerIdentity, model: ModelReference) -> None:
    """Whether a server serves the run's model.

    Raises:
        ServerRefusedError: it serves another one, or in another dtype, or a folder that cannot be read.
    """
    if identity.dtype and identity.dtype != model.dtype:
        raise ServerRefusedError(
            f"computes in {identity.dtype}, and the run in {model.dtype}: start it with --dtype {model.dtype}"
        )
    path = Path(identity.model) / "config.json"
    if not path.is_file():
        return  # on another machine; what it generates is compared with the trainer's model after the first update
    try:
        described = [json.loads(each.read_text()) for each in (path, Path(model.path) / "config.json")]
        # The shape of a VLM is that of its language model.
        served, wanted = ({**(each.get("text_config") or {}), **each} for each in described)
    except (OSError, ValueError) as error:
        raise ServerRefusedError(f"serves {identity.model}, which cannot be compared: {error}") from None
    different = [
        f"{key} {served.get(key)} instead of {wanted.get(key)}" for key in _SHAPE if served.get(key) != wanted.get(key)
    ]
    if different:
        raise ServerRefusedError(f"serves another model, {identity.model}: {', '.join(different)}")


def check_fit(shapes: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]], *, is_tied: bool) -> None:
    """Whether weights are those of a model, by the names and shapes of their tensors.

    Args:
        shapes: of the weights.
        model: of the model's own.
        is_tied: whether its head is its embeddings; then it may be missing on either side.

    Raises:
        RunError: tensors are missing, of another shape, or of another model.
    """
    tied = {name for name in shapes.keys() ^ model.keys() if is_tied and name.endswith("lm_head.weight")}
    faults = {
        "missing": sorted(model.keys() - shapes.keys() - tied),
        "unexpected": sorted(shapes.keys() - model.keys() - tied),
        "of another shape": sorted(n for n in shapes.keys() & model.keys() if tuple(shapes[n]) != tuple(model[n])),
    }
    if told := [
        f"{fault}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for fault, names in faults.items()
        if names
    ]:
        raise RunError(f"the weights do not fit the model that is served; {'; '.join(told)}")
