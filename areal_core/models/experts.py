"""Routed experts of an MoE: which experts each token went through, as servers report it and the trainer replays it
(routing replay, R3, arXiv 2510.11370).

A token's row holds the experts, counted from 1, that the position before it was routed to, for that position predicted
the token. 0 stands for no expert: the position is routed as usual.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig
    from areal_core.data.trajectory import Values
    from areal_core.interfaces.model import StoredModel

ROUTED_EXPERTS = "routed_experts"
"""Key of a batch's tokens: [T, layers, choices], for the layers that have experts."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json for the number of experts."""

MODEL_TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types whose routers are a softmax of logits, so that the experts' weights follow from the choice of experts."""


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The routers of a model.

    Attributes:
        depth: number of layers of the model.
        layers: indices of the layers with a router, counted from 0.
        experts: number of experts of each.
        choices: number of experts that a token goes through.

    Example:
        >>> from areal_core.models import EXPERTS, MoEShape
        >>> config = {"model_type": "olmoe", "num_hidden_layers": 2, "num_experts": 64, "num_experts_per_tok": 8}
        >>> MoEShape.of(config)
        MoEShape(depth=2, layers=(0, 1), experts=64, choices=8)
        >>> [config[key] for key in EXPERTS if key in config]  # for any model type
        [64]
    """

    depth: int
    layers: tuple[int, ...]
    experts: int
    choices: int

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> MoEShape:
        """Return the shape of a model by its config.json.

        Raises:
            RunError: the model is not of `MODEL_TYPES`.
            KeyError: the config lacks a size.
        """
        kind = description.get("model_type")
        if kind not in MODEL_TYPES:
            raise RunError(
                f"routed_experts is set, and model type {kind} has no routers whose choices are known",
                hints=["set inference_engine.routed_experts to false", f"it is for {', '.join(MODEL_TYPES)}"],
            )
        step = description.get("decoder_sparse_step") or 1
        dense_layers = description.get("mlp_only_layers") or ()
        depth = description["num_hidden_layers"]
        return cls(
            depth,
            tuple(layer for layer in range(depth) if layer not in dense_layers and not (layer + 1) % step),
            description.get("num_local_experts") or description["num_experts"],
            description["num_experts_per_tok"],
        )

    @classmethod
    def read(cls, folder: str) -> MoEShape:
        """Return the shape of the model in a folder. Raises RunError as `of` does, and if it has no config.json."""
        try:
            return cls.of(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError) as error:
            raise RunError(f"the config of the model in {folder} cannot be read: {error!r}") from None

    @property
    def dtype(self) -> str:
        """The smallest integer dtype that holds the choices, as PyTorch names it."""
        return "uint8" if self.experts < 2**8 else "int16"

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the choices of one token."""
        return len(self.layers), self.choices


def routed_experts_field(experts: np.ndarray, moe: MoEShape, tokens: int) -> dict[str, Values]:
    """Return the routed experts of a generation as a column.

    Args:
        experts: integers, counted from 0, of all tokens but the last, all layers of the model and all choices, in this
            order. Those of layers without experts are ignored.
        moe: the model's routers.
        tokens: number of tokens, prompt and answer together.

    Returns:
        [T, layers, choices]. The first row is 0, for no position predicts the first token.

    Raises:
        ValueError: these are not choices of this model.

    Example:
        >>> import numpy as np
        >>> from areal_core.models import ROUTED_EXPERTS, MoEShape, routed_experts_field
        >>> moe = MoEShape(depth=2, layers=(1,), experts=8, choices=2)  # the first of two layers is dense
        >>> reported = np.array([[[0, 0], [5, 2]], [[0, 0], [7, 5]]])  # for the first two of three tokens
        >>> routed_experts_field(reported, moe, tokens=3)[ROUTED_EXPERTS].tolist()
        [[[0, 0]], [[6, 3]], [[8, 6]]]
    """
    if experts.size != (tokens - 1) * moe.depth * moe.choices:
        form = f"{tokens - 1} tokens, {moe.depth} layers and {moe.choices} choices"
        raise ValueError(f"{experts.size} experts, which are not those of {form}")
    all_layers = experts.astype(np.int64).reshape(-1, moe.depth, moe.choices)
    choices = all_layers[:, list(moe.layers)]
    if len(choices) and not 0 <= int(choices.min()) <= int(choices.max()) < moe.experts:
        raise ValueError(f"experts {int(choices.min())} to {int(choices.max())} of {moe.experts}")
    no_choice = np.full((1, *moe.shape), -1)
    return {ROUTED_EXPERTS: (np.concatenate([no_choice, choices]) + 1).astype(moe.dtype)}


def replay_problems(config: RunConfig) -> Iterable[str]:
    """Yield why the trainer cannot replay routed experts; for the `check` of an inference engine's settings."""
    chosen = config.train_engine
    if not getattr(chosen.settings, "replays_routed_experts", False):
        yield (
            f"routed_experts: train_engine {chosen.reference} does not go through the same experts again: choose one "
            "that does, such as fsdp/fsdp, or set it to false"
        )


def model_problems(model: StoredModel) -> Iterable[str]:
    """Yield why servers cannot report routed experts of a model; for `check_model` of their settings."""
    try:
        MoEShape.of(model.description)
    except RunError as error:
        yield ": ".join((error.message, *error.hints))
    except LookupError as error:
        yield f"routed_experts is set, and the config.json of the model in {model.folder} lacks {error}: save it again"
