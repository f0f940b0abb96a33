"""Which experts the tokens of an MoE went through, in the form in which it travels from where they were generated to
where they are trained (routing replay, R3, arXiv 2510.11370).

A token's row are the choices, counted from 1, that its position's predecessor made: those by which it was predicted, as
its log-probability is of what its predecessor gave. 0 is no choice: the position routes by itself.
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
    from areal_core.interfaces import StoredModel

ROUTED_EXPERTS = "routed_experts"
"""Key of tokens in a batch: [T, layers, choices], the layers those that have experts."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How a config.json names their number."""

MODEL_TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Whose routers choose by a softmax of logits alone, so that the chosen experts' weights follow from the choice."""


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The routers of a model.

    Attributes:
        depth: layers of the model.
        layers: which of them have one, counted from 0.
        experts: of each.
        choices: of these, how many a token goes through.
    """

    depth: int
    layers: tuple[int, ...]
    experts: int
    choices: int

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> MoEShape:
        """Read a Hugging Face model's config.json.

        Raises:
            RunError: it is no MoE, or one whose weights follow from more than the choice.
        """
        kind = description.get("model_type")
        if kind not in MODEL_TYPES:
            raise RunError(
                f"routed_experts is set, and model type {kind} has no routers whose choices are known",
                hints=["set inference_engine.routed_experts to false", f"it is for {', '.join(MODEL_TYPES)}"],
            )
        every, without = description.get("decoder_sparse_step") or 1, description.get("mlp_only_layers") or ()
        depth = description["num_hidden_layers"]
        return cls(
            depth,
            tuple(layer for layer in range(depth) if layer not in without and not (layer + 1) % every),
            description.get("num_local_experts") or description["num_experts"],
            description["num_experts_per_tok"],
        )

    @classmethod
    def read(cls, folder: str) -> MoEShape:
        """Those of a model's folder. Raises RunError as `of` does, and where there is no config."""
        try:
            return cls.of(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError) as error:
            raise RunError(f"the config of the model in {folder} cannot be read: {error!r}") from None

    @property
    def dtype(self) -> str:
        """The smallest integers, as PyTorch names them, that hold the choices."""
        return "uint8" if self.experts < 2**8 else "int16"

    @property
    def shape(self) -> tuple[int, int]:
        """Of what is known of one token."""
        return len(self.layers), self.choices


def column_of(told: np.ndarray, moe: MoEShape, tokens: int) -> dict[str, Values]:
    """The column of a generation.

    Args:
        told: integers, counted from 0, of all tokens but the newest, all layers of the model and all choices, in this
            order; what stands for layers without experts is not looked at.
        moe: of the model.
        tokens: how many there are, prompt and answer.

    Returns:
        [T, layers, choices]: nothing predicts the first token.

    Raises:
        ValueError: these are no choices of this model.
    """
    if told.size != (tokens - 1) * moe.depth * moe.choices:
        form = f"{tokens - 1} tokens, {moe.depth} layers and {moe.choices} choices"
        raise ValueError(f"{told.size} experts, which are not those of {form}")
    every = told.astype(np.int64).reshape(-1, moe.depth, moe.choices)
    choices = every[:, list(moe.layers)]
    if len(choices) and not 0 <= int(choices.min()) <= int(choices.max()) < moe.experts:
        raise ValueError(f"experts {int(choices.min())} to {int(choices.max())} of {moe.experts}")
    nothing = np.full((1, *moe.shape), -1)
    return {ROUTED_EXPERTS: (np.concatenate([nothing, choices]) + 1).astype(moe.dtype)}


def replay_problems(config: RunConfig) -> Iterable[str]:
    """Why what the engine tells of its choices would be of no use, for an engine's `check`."""
    chosen = config.train_engine
    if not getattr(chosen.settings, "replays_routed_experts", False):
        yield (
            f"routed_experts: train_engine {chosen.reference} does not go through the same experts again: choose one "
            "that does, such as fsdp/fsdp, or set it to false"
        )


def model_problems(model: StoredModel) -> Iterable[str]:
    """Why an engine cannot tell of this model which experts tokens go through, for its `check_model`."""
    try:
        MoEShape.of(model.description)
    except RunError as error:
        yield ": ".join((error.message, *error.hints))
    except LookupError as error:
        yield f"routed_experts is set, and the config.json of the model in {model.folder} lacks {error}: save it again"
