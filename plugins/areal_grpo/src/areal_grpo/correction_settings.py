"""Settings of corrections. This module does not import torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from areal_core.sdk import CorrectionSettings


class TokenTruncateSettings(CorrectionSettings):
    """Settings of `corrections.token_truncate`."""

    cap: float = Field(2.0, gt=0, description="Upper bound of a token's importance weight.")


class BoundsSettings(CorrectionSettings):
    """Settings of a correction with a lower and an upper bound."""

    low: float = Field(ge=0, description="Lower bound of the importance weight.")
    high: float = Field(gt=0, description="Upper bound of the importance weight.")

    @model_validator(mode="after")
    def _check_order(self) -> BoundsSettings:
        if not self.low <= 1 <= self.high:
            raise ValueError("low must be at most 1 and high at least 1: 1 is the weight of a token sampled on policy")
        return self


class TokenMaskSettings(BoundsSettings):
    """Settings of `corrections.token_mask`."""

    low: float = Field(0.5, ge=0, description="Lower bound of the importance weight. Tokens below it are masked.")
    high: float = Field(5.0, gt=0, description="Upper bound of the importance weight. Tokens above it are masked.")


class SequenceTruncateSettings(CorrectionSettings):
    """Settings of `sequence_corrections.sequence_truncate`."""

    cap: float = Field(5.0, gt=0, description="Upper bound of a sequence's importance weight.")


class GeometricMaskSettings(BoundsSettings):
    """Settings of `sequence_corrections.geometric_mask`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(
        0.99,
        gt=0,
        description="Lower bound of the geometric mean of a sequence's ratios. Sequences below it are masked.",
    )
    high: float = Field(
        1.01,
        gt=0,
        description="Upper bound of the geometric mean of a sequence's ratios. Sequences above it are masked.",
    )


class ProductMaskSettings(BoundsSettings):
    """Settings of `sequence_corrections.product_mask`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(
        0.5, gt=0, description="Lower bound of the product of a sequence's ratios. Sequences below it are masked."
    )
    high: float = Field(
        2.0, gt=0, description="Upper bound of the product of a sequence's ratios. Sequences above it are masked."
    )


class VetoSettings(CorrectionSettings):
    """Settings of `sequence_corrections.veto`."""

    only_masks: ClassVar[bool] = True
    low: float = Field(
        1e-4,
        ge=1e-8,
        lt=1,
        description="Lower bound of every ratio of a sequence. A sequence with one ratio below it is masked.",
    )


class OPSMSettings(CorrectionSettings):
    """Settings of `sequence_corrections.opsm`."""

    only_masks: ClassVar[bool] = True
    threshold: float = Field(
        gt=0,
        description="δ of off-policy sequence masking (arXiv 2512.02556), in nats per token: sequences with a "
        "negative advantage and a larger mean log(μ / π) are masked. The paper gives no value. TRL uses 0.5, "
        "relative to the current policy as here; slime uses 0.0001, relative to the proximal policy.",
    )


class KPopSettings(CorrectionSettings):
    """Settings of `corrections.kpop`."""

    threshold: float = Field(
        2.0,
        gt=0,
        description="Upper bound of the divergence between the policy that sampled and the proximal policy, in "
        "nats. Tokens above it are masked. AReaL's example has 2.0, KPop itself 0.1.",
    )


class IPOMaskSettings(CorrectionSettings):
    """Settings of `corrections.ipo_mask`."""

    only_masks: ClassVar[bool] = True
    threshold: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Upper bound of the absolute difference between a token's probability under the current policy "
        "and under the policy that sampled, from 0 to 1. Tokens above it are masked. prime-rl uses 0.3 since September "
        "2026, before that 0.1.",
    )
