"""Settings of the optimizer, and the learning-rate schedule. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from areal_core.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class LearningSettings(Settings):
    """Settings that all training engines share: AdamW, its learning rate, and micro-batches."""

    computes_top_logprobs: ClassVar[bool] = True
    computes_sum_pi_squared: ClassVar[bool] = True
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate. null: 1e-6 in RL, 2e-5 for SFT, 5e-7 for DPO, IPO and KTO, 6e-7 for SimPO, "
        "8e-6 for ORPO, 1e-5 for reward models and distillation; ten times that for LoRA adapters and for critics.",
    )
    betas: tuple[Share, Share] = Field(
        (0.9, 0.999), description="AdamW's decay rates of the first and second moment, β1 and β2."
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW's ε, added to the denominator for numerical stability.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of AdamW. Applies to matrices only, never to biases and norms."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Number of updates over which the learning rate rises linearly, from learning_rate / "
        "warmup_steps. 0: no warm-up. Hugging Face's schedules start from 0 instead, one update later.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule after the warm-up."
    )
    minimum_learning_rate_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Final learning rate of the linear and cosine schedules, as a share of learning_rate from 0 to 1.",
    )
    max_gradient_norm: float | None = Field(
        1.0,
        gt=0,
        description="Maximum global norm of the gradient, to which larger ones are clipped. null: no clipping.",
    )
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Maximum number of tokens in a micro-batch on each rank. Must be enough for the longest answer. "
        "Micro-batches are balanced by tokens, and a longer sequence gets one of its own. Padding counts where a "
        "model computes padded rows.",
    )
    logprob_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Number of tokens whose logits are in memory at a time. null: 1,024 on a CPU; on a GPU chosen "
        "by its memory.",
    )

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch on all ranks that share its sequences."""
        return self.max_tokens_per_microbatch

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield a problem if the longest sequence that the config allows exceeds a micro-batch."""
        if config.longest_sequence > self.tokens_at_once:
            yield (
                f"sequences may have {config.longest_sequence} tokens (sampling.max_new_tokens, workflow.max_tokens), "
                f"but max_tokens_per_microbatch is {self.max_tokens_per_microbatch}: raise it"
            )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Yield a note if the run ends before its warm-up."""
        updates = config.steps * config.training.updates
        if self.warmup_steps >= updates:
            yield f"warmup_steps is {self.warmup_steps}, but the run has {updates} updates: it ends before its warm-up"


def learning_rate_at(update: int, settings: LearningSettings, total_updates: int) -> float:
    """Return the learning rate of an update.

    Args:
        update: number of earlier updates, including skipped ones.
        settings: warm-up, schedule and bounds.
        total_updates: number of updates of the whole run, at which the decay ends.
    """
    assert settings.learning_rate is not None  # engines set a default at setup
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    lowest = settings.minimum_learning_rate_ratio
    return settings.learning_rate * (lowest + (1 - lowest) * left)
