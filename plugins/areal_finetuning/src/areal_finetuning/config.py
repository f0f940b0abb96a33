"""Settings of algorithms and example tokenizers. This module does not import torch, so that configs can be checked
anywhere.

In the formulas π is the trained model, x a prompt, y_c the chosen and y_r the rejected answer, U the number of pairs of
an update, σ(z) = 1 / (1 + exp(-z)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from areal_core.chat import TemplateSettings, undecided_text
from areal_core.config import Selection, Settings, component
from areal_core.models import text_config
from areal_core.sdk import ACTOR, REFERENCE, ForwardPass, PolicyGradientSettings, PolicyLossSettings, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel

REWARD_MODEL = Role("reward", head="scalar", trains=True)
"""Model that scores a whole sequence at its last token."""
TEACHER = Role("teacher", needs_path=True)
"""Model that a policy is distilled from."""


class EncodingSettings(TemplateSettings):
    """Settings of every example tokenizer in `example_tokenizers`."""

    max_tokens: int | None = Field(
        None,
        ge=2,
        description="Maximum number of tokens in a sequence, the end token included. null: the model's context length.",
    )
    overlong: Literal["refuse", "truncate", "skip"] = Field(
        "refuse",
        description="What happens to a sequence over max_tokens. `refuse`: end the run and name the row. "
        "`truncate`: cut its end off; the model then learns from an answer that has no end. `skip`: leave it out "
        "and count it.",
    )
    end_token: str | None = Field(
        None, description="Token that follows each learned answer if the chat template writes no end, such as '</s>'."
    )

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Check that max_tokens is within the model's context."""
        context = text_config(model.description).get("max_position_embeddings")
        if self.max_tokens is not None and isinstance(context, int) and self.max_tokens > context:
            yield (
                f"max_tokens is {self.max_tokens}, but the model's context has {context} tokens: set max_tokens to at "
                f"most {context}, or to null"
            )

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why `text_has_special_tokens` must be set for a row; empty if it need not be."""
        if self.text_has_special_tokens is not None or tokenizer is None:
            return ""
        keys = ("prompt", "completion", "chosen", "rejected")
        return undecided_text(tokenizer, row, keys, "algorithm.example_tokenizer.text_has_special_tokens")


class RowsSettings(Settings):
    """Settings of algorithms that train on the rows of a data set."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse a workflow, because nothing is generated."""
        return _with_a_workflow(config)


def _with_a_workflow(config: RunConfig) -> Iterable[str]:
    if config.workflow is not None:
        yield "it trains on the rows of the data set and generates nothing: remove workflow and inference_engine"


class SupervisedSettings(RowsSettings):
    """Supervised fine-tuning: L = -Σ_t w_t log π(y_t), the negative log-likelihood of the answers in the rows.

    On answers of a stronger model this is supervised distillation (sequence-level knowledge distillation, arXiv
    1606.07947).
    """

    default_learning_rate: ClassVar[float] = 2e-5

    example_tokenizer: Selection = component(
        "example_tokenizers",
        default="finetuning/conversations",
        description="Converts a row to the tokens to train on.",
    )
    loss_aggregation: Selection = component(
        "loss_aggregations", default="core/token_mean", description="How the losses of tokens are added up."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained."""
        return (ACTOR,)


class PairSettings(RowsSettings):
    """Settings of algorithms that train a policy on pairs of a chosen and a rejected answer."""

    example_tokenizer: Selection = component(
        "example_tokenizers",
        default="finetuning/preferences",
        description="Converts a row to a chosen and a rejected sequence.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained."""
        yield ACTOR


class DPOSettings(PairSettings):
    """Direct preference optimization (arXiv 2305.18290, equation 7).

    L = -1/U Σ log σ(β h), with h = log π(y_c) / π_ref(y_c) - log π(y_r) / π_ref(y_r), each a sum over the tokens of an
    answer. The reference is the run's initial model, or the model of `roles.reference.path`.
    """

    default_learning_rate: ClassVar[float] = 5e-7

    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="Loss of a pair. `sigmoid`: DPO's -log σ(β h). `ipo`: IPO's (h - 1 / (2β))². h is the log-ratio "
        "of the chosen to the rejected sequence under the policy, minus the same under the reference.",
    )
    beta: float = Field(0.1, gt=0, description="β: the larger it is, the closer the policy stays to the reference.")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of the labels that are assumed to be wrong, from 0 to 0.5 (conservative DPO). For "
        "`sigmoid` only.",
    )
    length_normalized: bool = Field(
        False,
        description="Divide each sequence's log-ratio by its number of tokens in the loss. The papers' formulas do "
        "not; IPO's experiments and TRL's IPO do.",
    )
    reference_free: bool = Field(
        False,
        description="Leave the reference out, as if it gave every answer the same probability, whatever its length. No "
        "second model is needed.",
    )

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> DPOSettings:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing works only with loss: sigmoid, but loss is {self.loss}: set it to 0")
        return self

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained, and the forward pass of the reference if there is one."""
        yield from super().needs(updates)
        if not self.reference_free:
            yield ForwardPass(REFERENCE, "logprobs", "reference_logprobs")


class IPOSettings(DPOSettings):
    """Identity preference optimization (arXiv 2310.12036, equation 17): L = 1/U Σ (h - 1 / (2τ))², with β for τ.

    DPO increases h without bound if labels never contradict each other; here the optimum of h is 1 / (2β). In the paper
    h is a sum over the tokens of each answer, as in DPO. The authors' experiments used the mean over its tokens (they
    confirmed it to TRL, which uses the mean, too): set `length_normalized: true` for their results and values of β.
    """

    loss: Literal["sigmoid", "ipo"] = Field("ipo", description=str(DPOSettings.model_fields["loss"].description))


class SimPOSettings(PairSettings):
    """Simple preference optimization (arXiv 2405.14734, equation 6).

    L = -1/U Σ log σ(β (l_c - l_r) - γ), with l the mean log-probability of an answer's tokens under π: no reference.

    The defaults are the authors' for Llama 3 Base. TRL's CPO trainer, with `loss_type="simpo"` and `cpo_alpha=0`, has
    the same loss with β = 0.1 and γ = 0.5.
    """

    default_learning_rate: ClassVar[float] = 6e-7

    beta: float = Field(2.0, gt=0, description="β, the factor of mean log-probabilities in the reward.")
    gamma: float = Field(
        1.0,
        ge=0,
        description="Margin by which the chosen answer's reward should exceed the rejected one's. It has the scale of "
        "beta: the authors set gamma / beta from 0.1 to 0.8.",
    )


class ORPOSettings(PairSettings):
    """Odds ratio preference optimization (arXiv 2403.07691, equation 6).

    L = 1/U Σ [-l_c - λ log σ(log odds_c - log odds_r)], with l the mean log-probability of an answer's tokens under π
    and odds = p / (1 - p) for p = exp(l): supervised fine-tuning on the chosen answers and a penalty, no reference.

    The first term is the paper's: the mean over the tokens of each chosen answer. TRL's experimental ORPO trainer
    averages it over all tokens of prompts and chosen answers of the batch; the second term is the same.
    """

    default_learning_rate: ClassVar[float] = 8e-6

    weight: float = Field(
        0.1, gt=0, description="Weight λ of the odds ratio beside the likelihood of chosen answers. TRL calls it beta."
    )


class KTOSettings(RowsSettings):
    """Kahneman-Tversky optimization (arXiv 2402.01306, equation 7): answers with a label instead of pairs.

    L = 1/B Σ λ (1 - σ(± β (r - z))), with r = log π(y) / π_ref(y), + and λ_D for desirable answers, - and λ_U for
    undesirable ones. z = max(0, mean of log π(y') / π_ref(y')) estimates KL(π ‖ π_ref): y' is the answer of the row
    before, given this row's prompt, for all B rows of an update. No gradient flows through z. TRL's KTO trainer has the
    same loss; it takes z over the micro-batches of all ranks at that moment. The reference is the run's initial model,
    or the model of `roles.reference.path`.
    """

    default_learning_rate: ClassVar[float] = 5e-7

    beta: float = Field(0.1, gt=0, description="β: the larger it is, the closer the policy stays to the reference.")
    desirable_weight: float = Field(
        1.0,
        ge=0,
        description="Weight λ_D of desirable answers. With more answers of one kind, raise the weight of the other: "
        "the authors keep (λ_D x desirable) / (λ_U x undesirable) between 1 and 1.5.",
    )
    undesirable_weight: float = Field(1.0, ge=0, description="Weight λ_U of undesirable answers.")
    example_tokenizer: Selection = component(
        "example_tokenizers", default="finetuning/labeled", description="Converts a row to a sequence with a label."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained, and the reference."""
        return (ACTOR, REFERENCE)

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse a workflow, and updates of one row."""
        yield from super().check(config)
        if config.rollout.batch_size < 2 * config.training.num_minibatches:
            yield (
                "the KL is estimated with the answers of other rows: rollout.batch_size must be at least "
                f"{2 * config.training.num_minibatches}, two rows for each of training.num_minibatches"
            )


class RewardModelSettings(RowsSettings):
    """Bradley-Terry reward model: L = -1/U Σ [log σ(s_c - s_r - m) - c (s_c + s_r)²].

    s is the score at the last token of a sequence (InstructGPT, arXiv 2203.02155, equation 1). m is the row's `margin`,
    0 if it has none (Llama 2, arXiv 2307.09288, section 3.2.2). c keeps scores around 0, which the first term does not
    determine (arXiv 2312.09244).
    """

    default_learning_rate: ClassVar[float] = 1e-5

    example_tokenizer: Selection = component(
        "example_tokenizers",
        default="finetuning/preferences",
        description="Converts a row to a chosen and a rejected sequence.",
    )
    centering: float = Field(
        0.0, ge=0, description="Weight c of (s_c + s_r)², which keeps scores around 0. Usually 0.01. 0: none."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained: the run's model with a head of one value."""
        return (REWARD_MODEL,)


class TeacherKLSettings(Settings):
    """Settings of `distillation.teacher_kl`."""

    coefficient: float = Field(1.0, gt=0, description="Factor that the advantage is multiplied by.")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward passes of the teacher and the policy."""
        return (
            ForwardPass(TEACHER, "logprobs", "teacher_logprobs"),
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
        )


class DistillationSettings(PolicyLossSettings):
    """Settings of `distillation.distillation`, which has none."""

    anchor = "none"

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward pass of the teacher, for the logged distance."""
        return (ForwardPass(TEACHER, "logprobs", "teacher_logprobs"),)


class DistillSettings(PolicyGradientSettings):
    """On-policy distillation (GKD, arXiv 2306.13649, with the reverse KL): a teacher scores the policy's tokens.

    A_t = -(log π_prox(y_t) - log π_teacher(y_t));  L = -1/N Σ_t w_t A_t log π(y_t) over the N tokens of an update, with
    w_t = min(π_prox / μ, 2), where μ is the policy that sampled and π_prox the one at the start of the batch.

    In expectation over a token this is the gradient of KL(π ‖ π_teacher) given the text before it. Effects of a token
    on later tokens are ignored; MiniLLM (arXiv 2306.08543) adds them up in returns. The paper differentiates the KL
    over the whole vocabulary; one sampled token has the same expectation and more variance.
    """

    default_learning_rate: ClassVar[float] = 1e-5

    advantage: Selection = component(
        "advantages", default="finetuning/teacher_kl", description="Estimator that turns rewards into advantages."
    )
    corrections: list[Selection] = component(
        "corrections",
        default=["grpo/token_truncate"],
        description="Off-policy corrections for the distance between the policy that sampled and the proximal "
        "policy. Their weights are multiplied.",
    )
    policy_loss: Selection = component(
        "policy_losses", default="finetuning/distillation", description="Loss of each token."
    )


class ServedSettings(Settings):
    """A frozen model behind an address, which scores given tokens: a teacher or a reference too large for the trainer.

    It computes log-probabilities alone, for `distill` and for penalties towards a reference; `gkd` compares whole
    distributions, which no server returns. The model must have the policy's tokens.
    """

    has_own_model: ClassVar[bool] = True
    """Read by the check of `roles`: the section need not name a model."""

    addresses: list[str] = Field(
        min_length=1,
        description="Addresses of the servers, such as `http://host:30000`, one for each model. With several, "
        "`chosen_by` says which one scores a sequence.",
    )
    chosen_by: str | None = Field(
        None,
        description="Column of the batch with the place of each sequence's model in addresses, from 0: "
        "`reward.NAME` for a reward function of weight 0, such as finetuning/place. null: there is one address.",
    )
    protocol: Literal["sglang", "openai"] = Field(
        "sglang",
        description="What the server speaks. `sglang`: /generate of SGLang. `openai`: /v1/completions with token ids, "
        "echo and logprobs, as vLLM has it.",
    )
    served_model: str | None = Field(
        None,
        description="Name of the model in requests of the protocol `openai`. null: the only one that the server lists "
        "at /v1/models.",
    )
    max_concurrent_requests: int = Field(64, ge=1, description="Largest number of requests at a time to each server.")
    timeout_s: float = Field(600.0, gt=0, description="Longest wait for an answer, in seconds.")
    attempts: int = Field(
        5,
        ge=1,
        description="How often a request is sent to a server that is lost, with pauses of 1, 2, 4, ... seconds, before "
        "the run ends.",
    )
    api_key_variable: str | None = Field(
        None, description="Environment variable of the trainer with the key that the servers ask for. null: no key."
    )

    @model_validator(mode="after")
    def _check_choice(self) -> ServedSettings:
        if len(self.addresses) > 1 and self.chosen_by is None:
            raise ValueError(
                f"there are {len(self.addresses)} addresses, but nothing says which one scores a sequence: set "
                "chosen_by, such as reward.place"
            )
        return self

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check the temperature, and that there is the reward which chooses a model."""
        if config.sampling.temperature != 1:
            yield (
                f"servers score given tokens at temperature 1, but sampling.temperature is "
                f"{config.sampling.temperature}: set it to 1"
            )
        name = (self.chosen_by or "").removeprefix("reward.")
        names = [getattr(chosen.common, "name", None) or chosen.target.rpartition("/")[2] for chosen in config.rewards]
        if self.chosen_by is not None and self.chosen_by.startswith("reward.") and name not in names:
            yield f"chosen_by is {self.chosen_by}, but no reward is called {name}: add one, such as finetuning/place"


class PlaceSettings(Settings):
    """Settings of `rewards.place`."""

    key: str = Field(description="Key of the row, such as `teacher`.")
    values: list[str] = Field(min_length=1, description="Values of that key, in the order of what they choose.")


class GKDSettings(Settings):
    """Generalized knowledge distillation (GKD, arXiv 2306.13649): L = Σ_t w_t D_β(p_teacher, π).

    Distributions are compared over the whole vocabulary, given the text before a token. With M = β p_teacher + (1 - β)
    π, D_β = β KL(p_teacher ‖ M) + (1 - β) KL(π ‖ M). At the ends, where that is 0, D_β is KL(p_teacher ‖ π) for β = 0
    and KL(π ‖ p_teacher) for β = 1. The policy generates the text (the paper's λ = 1), or it is the text of the rows
    (λ = 0). No gradient flows through the sampling, so stale text needs no correction. β = 0.5 is TRL's default; in
    the paper the best β depends on the task.
    """

    default_learning_rate: ClassVar[float] = 1e-5

    beta: float = Field(
        0.5,
        ge=0,
        le=1,
        description="β, from 0 to 1, of the divergence between teacher and policy. 0: forward KL, which covers all "
        "tokens that the teacher finds likely. 1: reverse KL, which concentrates on the most likely ones.",
    )
    example_tokenizer: Selection | None = component(
        "example_tokenizers",
        description="Converts a row to the tokens to train on. null: the policy generates them, which needs a "
        "workflow.",
    )
    loss_aggregation: Selection = component(
        "loss_aggregations", default="core/token_mean", description="How the divergences of tokens are added up."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the model that is trained, and the teacher."""
        return (ACTOR, TEACHER)

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the text comes either from a workflow or from the rows."""
        if self.example_tokenizer is not None:
            yield from _with_a_workflow(config)
        elif config.workflow is None:
            yield "nothing generates: set workflow and inference_engine, or algorithm.example_tokenizer: conversations"
