"""Settings of optimizers, and what the memory plan knows about them. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from areal_core.config import Settings


class FSDPOptimizerSettings(Settings):
    """Settings of an optimizer. The learning rate, betas, epsilon and weight decay are settings of the engine.

    A plugin's settings may derive from it so that the memory plan knows the size of the state.
    """

    layer_bytes: ClassVar[float] = 8
    """Bytes of state for an element of a layer's parameters. 8: two float32 moments."""
    other_bytes: ClassVar[float] = 8
    """Bytes of state for an element of other parameters, such as embeddings and the head."""


class MuonSettings(FSDPOptimizerSettings):
    """Muon for the matrices of layers, AdamW for all other parameters.

    B ← m B + (1 - m) G;  W ← W - η (0.2 √max(n, k) NS((1 - m) G + m B) + d W), for an [n, k] matrix W with gradient G.
    NS, the Newton-Schulz iteration in bfloat16, replaces the singular values of a matrix by values around 1 (Jordan et
    al., "Muon: An optimizer for hidden layers in neural networks", 2024). The factor 0.2 √max(n, k) gives an update
    AdamW's usual size (arXiv 2502.16982, equation 4), so η and d are the engine's `learning_rate` and `weight_decay`.
    """

    layer_bytes: ClassVar[float] = 4

    momentum: float = Field(0.95, ge=0, lt=1, description="Momentum m of the gradient, with Nesterov's look-ahead.")
    iterations: int = Field(5, ge=1, le=20, description="Number of Newton-Schulz iterations in an update.")


class AdamW8bitSettings(FSDPOptimizerSettings):
    """AdamW with moments of 8 bits, quantized in blocks with a dynamic code (arXiv 2110.02861).

    A parameter keeps moments in float32 if a rank's part of it has fewer than 4,096 elements or no whole number of
    blocks.
    """

    layer_bytes: ClassVar[float] = 2 * (1 + 4 / 256)
    other_bytes: ClassVar[float] = 2 * (1 + 4 / 256)
