"""Settings of composed algorithms. An algorithm of a plugin is mostly a subclass with its paper's defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from areal_core.config import Selection, Settings, component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class ReferenceKLSettings(Settings):
    """A penalty on the distance from a reference model, added to the loss of each token.

    What counts in a loss is the gradient. For tokens that the policy itself has sampled, the expected gradient of k2 is
    that of KL(policy ‖ reference), which seeks a mode of the reference; that of k3 is the gradient of
    KL(reference ‖ policy), which covers it. That of k1 is 0 in expectation, so that it would add noise and no pull.
    """

    coefficient: float = Field(
        default=0.0, ge=0, description="its factor; 0 switches it off and loads no reference model"
    )
    estimator: Literal["k2", "k3"] = Field(
        default="k3",
        description="with d = log policy - log reference: k2 is d²/2, its gradient that of KL(policy ‖ reference); "
        "k3 is exp(-d) - 1 + d, its gradient that of KL(reference ‖ policy)",
    )

    @field_validator("estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 (d itself) has a gradient of 0 in expectation, so in a loss it pulls nowhere and only adds noise; "
                "choose k2 for the gradient of KL(policy ‖ reference), or k3 for that of KL(reference ‖ policy)"
            )
        return value


class PolicyGradientSettings(Settings):
    """`advantage ∘ filter ∘ correction ∘ loss ∘ aggregation`; a subclass sets the defaults of its algorithm."""

    advantage: Selection = component("advantages", description="turns rewards into advantages")
    filter: Selection | None = component("filters", description="decides which finished groups are trained on")
    correction: Selection | None = component(
        "corrections", description="corrects for the distance between the sampling policy and the learning one"
    )
    policy_loss: Selection = component("policy_losses", description="the loss of a token")
    aggregation: Selection = component(
        "aggregations", default="core/token_mean", description="how the tokens' losses are added up"
    )
    reference_kl: ReferenceKLSettings = Field(ReferenceKLSettings(), description="penalty towards a reference model")
    entropy_coefficient: float = Field(0.0, description="rewards entropy when positive")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Mistakes that show only beside the rest of the run's config."""
        if config.workflow is None:
            yield "it learns from what the policy writes, and nothing generates: set workflow and inference_engine"
        if self.reference_kl.coefficient and config.reference_model is None:
            yield (
                "reference_kl.coefficient is above 0 and there is no reference_model; add "
                "reference_model.path=PATH or set the coefficient to 0"
            )


class SupervisedSettings(Settings):
    """Supervised fine-tuning: the mean negative log-likelihood of the completions."""

    aggregation: Selection = component(
        "aggregations", default="core/token_mean", description="how the tokens' losses are added up"
    )


class ConstantLengthSettings(Settings):
    """The denominator of Dr. GRPO."""

    length: int = Field(ge=1, description="the constant, usually sampling.max_new_tokens")
