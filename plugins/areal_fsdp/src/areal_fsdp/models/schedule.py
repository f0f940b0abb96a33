"""What a training engine is told of learning, and the learning rate of each update. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from areal_core.config import Settings
from areal_core.servers.experts import choice_problems

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.interfaces import StoredModel

Share = Annotated[float, Field(ge=0, lt=1)]


class LearningSettings(Settings):
    """AdamW, its learning rate, and what is computed at once: of every training engine of ours."""

    learning_rate: float = Field(1e-5, gt=0, description="the highest, reached after the warm-up")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's decay of the first and second moment")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's term in the denominator")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; matrices only, never biases and norms")
    warmup_steps: int = Field(
        0, ge=0, description="updates over which the learning rate rises from 1 / warmup_steps of it"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    minimum_learning_rate_ratio: float = Field(
        0.0, ge=0, le=1, description="where linear and cosine end, as a share of learning_rate"
    )
    max_gradient_norm: float | None = Field(1.0, gt=0, description="clip the global norm to this; null never clips")
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="tokens that a rank has in the model at once; a longer sequence goes through alone. Ranks of a "
        "context have so many each",
    )
    logprob_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens whose logits exist at once, more where the vocabulary is tiny; null: 1,024 on a CPU, by "
        "its memory on a GPU",
    )

    @property
    def tokens_at_once(self) -> int:
        """Of a micro-batch, on all ranks that have its sequences together."""
        return self.max_tokens_per_microbatch

    def check(self, config: RunConfig) -> Iterable[str]:
        """What is known to become too long is told before the start; what is not goes through alone."""
        if config.longest_sequence > self.tokens_at_once:
            yield (
                f"sequences may have {config.longest_sequence} tokens (sampling.max_new_tokens behind a prompt, or "
                f"workflow.max_tokens), and max_tokens_per_microbatch is {self.max_tokens_per_microbatch}: raise it"
            )

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """The routers of an MoE must be able to choose."""
        del config
        yield from choice_problems(model)


def learning_rate_at(update: int, settings: LearningSettings, total_updates: int) -> float:
    """The learning rate of an update.

    Args:
        update: how many updates were applied before it.
        settings: warm-up, schedule and bounds.
        total_updates: of the whole run; a decay ends there.
    """
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    lowest = settings.minimum_learning_rate_ratio
    return settings.learning_rate * (lowest + (1 - lowest) * left)
