"""Settings of composed algorithms. An algorithm of a plugin is mostly a subclass with its paper's defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class ReferenceKLSettings(Settings):
    """A penalty on the distance from a reference model, added to the loss of each token."""

    coefficient: float = Field(
        default=0.0, ge=0, description="its factor; 0 switches it off and loads no reference model"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="with d = log policy - log reference: k1 is d, k2 is d²/2, k3 is exp(-d) - 1 + d"
    )


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
