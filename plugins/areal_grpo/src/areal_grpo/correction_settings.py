"""Settings of corrections. Imports no torch, as `areal_grpo.config`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from areal_core.sdk import CorrectionSettings


class TokenTruncateSettings(CorrectionSettings):
    """Settings of `corrections.token_truncate`."""

    cap: float = Field(2.0, gt=0, description="the greatest weight of a token")


class BoundsSettings(CorrectionSettings):
    """The base of corrections that keep what is between two bounds."""

    low: float = Field(ge=0, description="the lower bound")
    high: float = Field(gt=0, description="the upper bound")

    @model_validator(mode="after")
    def _ordered(self) -> BoundsSettings:
        if not self.low <= 1 <= self.high:
            raise ValueError("low must be at most 1 and high at least 1: 1 is the weight of a token sampled on policy")
        return self


class TokenMaskSettings(BoundsSettings):
    """Settings of `corrections.token_mask`."""

    low: float = Field(0.5, ge=0, description="tokens with a smaller weight are not learned from")
    high: float = Field(5.0, gt=0, description="tokens with a greater weight are not learned from")


class SequenceTruncateSettings(CorrectionSettings):
    """Settings of `sequence_corrections.sequence_truncate`."""

    cap: float = Field(5.0, gt=0, description="the greatest weight of a sequence")


class GeometricMaskSettings(BoundsSettings):
    """Settings of `sequence_corrections.geometric_mask`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(0.99, gt=0, description="sequences whose mean ratio is smaller are not learned from")
    high: float = Field(1.01, gt=0, description="sequences whose mean ratio is greater are not learned from")


class ProductMaskSettings(BoundsSettings):
    """Settings of `sequence_corrections.product_mask`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(0.5, gt=0, description="sequences whose ratio is smaller are not learned from")
    high: float = Field(2.0, gt=0, description="sequences whose ratio is greater are not learned from")


class VetoSettings(CorrectionSettings):
    """Settings of `sequence_corrections.veto`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(1e-4, ge=1e-8, lt=1, description="a sequence with one ratio below it is not learned from")


class OPSMSettings(CorrectionSettings):
    """Settings of `sequence_corrections.opsm`."""

    only_masks: ClassVar[bool] = True
    threshold: float = Field(
        gt=0,
        description="δ, nats per token; it has no default: the paper tells none, and what other programs call by this "
        "name is 0.5 (TRL, to the current policy, as here) or 0.0001 (slime, to the proximal one)",
    )


class KPopSettings(CorrectionSettings):
    """Settings of `corrections.kpop`."""

    threshold: float = Field(
        2.0,
        gt=0,
        description="tokens with a greater divergence are not learned from, in nats; 2.0 is AReaL's example, 0.1 is "
        "KPop's own",
    )
