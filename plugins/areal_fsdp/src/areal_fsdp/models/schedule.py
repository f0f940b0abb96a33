"""What a training engine is told of learning, and the learning rate of each update. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from areal_core.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class LearningSettings(Settings):
    """AdamW, its learning rate, and what is computed at once: of every training engine of ours."""

    learning_rate: float | None = Field(
        None, gt=0, description="the highest; null: RL 1e-6, SFT 2e-5, DPO 5e-7, others 1e-5; adapters, critics: x 10"
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's decay of the first and second moment")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's term in the denominator")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; matrices only, never biases and norms")
    warmup_steps: int = Field(
        0,
        ge=0,
        description="updates over which it rises from 1 / warmup_steps of learning_rate. Hugging Face's schedules "
        "begin at 0, one update behind",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    minimum_learning_rate_ratio: float = Field(
        0.0, ge=0, le=1, description="where linear and cosine end, as a share of learning_rate"
    )
    max_gradient_norm: float | None = Field(1.0, gt=0, description="clip the global norm to this; null never clips")
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Tokens of a micro-batch on each rank, enough for the longest answer. Micro-batches are balanced "
        "by tokens, and a longer sequence gets one of its own. Padding counts where a model computes padded rows.",
    )
    logprob_chunk_tokens: int | None = Field(
        None, ge=1, description="tokens whose logits exist at once; null: 1,024 on a CPU, by its memory on a GPU"
    )

    @property
    def tokens_at_once(self) -> int:
        """Of a micro-batch, on all ranks that have its sequences together."""
        return self.max_tokens_per_microbatch

    def check(self, config: RunConfig) -> Iterable[str]:
        """What is known to become too long is told before the start; what is not goes through alone."""
        if config.longest_sequence > self.tokens_at_once:
            long = f"sequences may have {config.longest_sequence} tokens (sampling.max_new_tokens, workflow.max_tokens)"
            yield f"{long}, and max_tokens_per_microbatch is {self.max_tokens_per_microbatch}: raise it"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """A warm-up that never ends."""
        if self.warmup_steps >= (updates := config.steps * config.training.updates):
            yield f"warmup_steps is {self.warmup_steps}, and the run has {updates} updates: it ends before its warm-up"


def learning_rate_at(update: int, settings: LearningSettings, total_updates: int) -> float:
    """The learning rate of an update.

    Args:
        update: number of updates before it, those that changed nothing included.
        settings: warm-up, schedule and bounds.
        total_updates: of the whole run; a decay ends there.
    """
    assert settings.learning_rate  # an engine has put in the algorithm's by now
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    lowest = settings.minimum_learning_rate_ratio
    return settings.learning_rate * (lowest + (1 - lowest) * left)
