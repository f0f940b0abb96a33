"""The table of comparisons: a component of areal, the function of another library, and what each one defines.

A case without `differs` says that both compute the same. One with `differs` says that they do not, and why: it fails,
too, once they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from samples import SHAPES, Sample, Shape, advantages, build, context, loss, policy_gradient
from theirs import (
    actor,
    core_algos,
    odds_ratio,
    openrlhf_losses,
    openrlhf_policy,
    openrlhf_utils,
    overlong,
    rollout_corr_helper,
    simpo,
    trl_policy,
    verl_policy,
    weights,
)

from areal_core.data import Episode, FinishReason, Generation, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        component: Kind and name in areal's plugin system.
        other: The other library.
        function: Its function.
        ours, theirs: Compute the same quantity of a sample: a loss, or a value of each token.
        settings: How the component is set, as a config has it; empty: as the case's function shows.
        note: What a reader must know to get the same from both.
        differs: How the two definitions differ; empty if they are the same.
        shapes: Forms of the batches.
        tolerance: Largest difference that is rounding.
    """

    component: str
    other: str
    function: str
    ours: Callable[[Sample], torch.Tensor]
    theirs: Callable[[Sample], torch.Tensor]
    settings: str = ""
    note: str = ""
    differs: str = ""
    shapes: tuple[Shape, ...] = SHAPES
    tolerance: float = 2e-6


C = core_algos
TIS = {"corrections": [{"type": "grpo/token_truncate", "cap": 2.0}]}
EMPTY = (Shape(empty=True),)
TOKENS = (*SHAPES, Shape(token_rewards=True), Shape(empty=True))
"""Shapes for advantages."""
PAIRS = (Shape(pairs=True),)
truncated = partial(weights, level="token", threshold=2.0)


def verl_advantage(function: Callable[..., Any], index: int = 0, **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return what one of verl's estimators computes, padded."""

    def compute(given: Sample) -> torch.Tensor:
        return function(given.rewards, given.mask, **settings)[index] * given.mask

    return compute


def by_group(function: Callable[..., Any], **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return what one of verl's estimators that compare answers to a prompt computes, padded."""
    return lambda given: function(given.rewards, given.mask, given.group, **settings)[0] * given.mask


def gdpo(given: Sample) -> torch.Tensor:
    """Return verl's advantages of two named rewards."""
    rewards = {name: given.batch[f"reward.{name}"].numpy() for name in ("first", "second")}
    prompts, attention = torch.zeros(len(given.mask), 1), torch.ones(len(given.mask), 2, dtype=torch.int64)
    return C.compute_gdpo_outcome_advantage(
        given.rewards,
        given.mask,
        given.group,
        config={"gdpo_reward_keys": list(rewards)},
        non_tensor_batch=rewards,
        batch={"prompts": prompts, "attention_mask": attention},
    )[0]


def aggregated(name: str, theirs: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    """Return both sides of a comparison of loss aggregations: of the log-probabilities as losses of tokens."""

    def ours(given: Sample) -> torch.Tensor:
        component, chosen = build("loss_aggregations", name, **settings)
        return (component(given.batch, **dict(chosen)) * given.passes["current"]).sum()

    return {"ours": ours, "theirs": lambda given: theirs(given.current, given.mask)}


def transformed(name: str, column: str, **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return the function that computes a column of a batch transform, [T]."""

    def compute(given: Sample) -> torch.Tensor:
        component, chosen = build("batch_transforms", name, **settings)
        batch = given.batch.with_tokens(
            proximal_logprobs=given.passes["proximal"], reference_logprobs=given.passes["reference"]
        )
        step = context(given)
        found = component(batch, step, **dict(chosen))
        return step.state[column] if column in step.state else found[column]

    return compute


def value_regression(given: Sample) -> torch.Tensor:
    """Return the critic's loss, with values clipped to 0.2 around the old ones."""
    component, chosen = build("auxiliary_losses", "grpo/value_regression", clip=0.2)
    mask = given.batch["loss_mask"].float()
    columns = {"returns": given.passes["returns"], "values": given.passes["old_values"]}
    spec = component(given.batch.with_tokens(**columns, loss_weights=mask / mask.sum()), None, **dict(chosen))
    return spec.loss(spec.batch, {"values": given.passes["values"]}).loss


def verl_adaptive_kl(given: Sample) -> torch.Tensor:
    """Return verl's coefficient after a batch with the KL of an episode."""
    controller = C.AdaptiveKLController(0.1, 3.0, 100)
    kl = (C.kl_penalty(given.proximal, given.reference, "kl") * given.mask).sum(1).mean()
    controller.update(float(kl), len(given.mask))
    return torch.tensor(controller.value)


def verl_rejection(option: str, threshold: str, *, keep_denominator: bool) -> Callable[[Sample], torch.Tensor]:
    """Return verl's loss with rejected sequences, as it is or with all tokens in the denominator."""

    def compute(given: Sample) -> torch.Tensor:
        difference = given.proximal - given.behavior
        kept = rollout_corr_helper.compute_rollout_rejection_mask(difference, given.mask, option, threshold)[0]
        mask, importance = (given.mask, kept) if keep_denominator else (kept, None)
        parts = given.proximal, given.current, given.advantages, mask, "token-mean", actor(), importance
        return C.compute_policy_loss_vanilla(*parts)[0]

    return compute


LENGTHS = range(1, 40)
RAW = torch.linspace(-3, 3, len(LENGTHS))


def shaped(name: str, rewards: torch.Tensor, **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return the function that shapes the rewards of answers of 1 to 39 tokens."""

    def compute(given: Sample) -> torch.Tensor:
        component, chosen = build("reward_shaping", name, **settings)
        episodes = [
            Episode([Trajectory.from_generation([1], Generation([2] * n, [-1.0] * n, [0] * n, FinishReason.STOP))], r)
            for n, r in zip(LENGTHS, rewards.tolist(), strict=True)
        ]
        return torch.tensor([episode.reward for episode in component(episodes, **dict(chosen))])

    return compute


KEPT = "verl removes rejected tokens from the denominator. Compared with its mask as weights, so that they stay in it."
EMPTY_ROW = (
    "A sequence without a token in the loss counts as a loss of 0 here and in TRL, and not at all in verl and OpenRLHF."
)
GIVEN = "TRL's weights min(ρ, 2) are passed in, because its trainer computes them beside the generation."

POLICY_LOSSES = [
    Case(
        "policy_losses grpo/ppo_clip",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type dapo",
        policy_gradient(),
        trl_policy,
    ),
    Case(
        "policy_losses grpo/ppo_clip",
        "verl",
        "compute_policy_loss_vanilla",
        policy_gradient(policy_loss={"type": "grpo/ppo_clip", "clip_high": 0.28, "dual_clip": 1.5}),
        verl_policy(C.compute_policy_loss_vanilla, clip_ratio_high=0.28, clip_ratio_c=1.5),
    ),
    Case(
        "policy_losses grpo/ppo_clip",
        "OpenRLHF",
        "PolicyLoss",
        policy_gradient(policy_loss={"type": "grpo/ppo_clip", "clip_high": 0.28, "dual_clip": 1.5}),
        lambda given: openrlhf_policy(given, clip_eps_high=0.28, dual_clip=1.5),
    ),
    Case(
        "policy_losses grpo/reinforce",
        "verl",
        "compute_policy_loss_reinforce",
        policy_gradient(policy_loss="grpo/reinforce", **TIS),
        verl_policy(C.compute_policy_loss_reinforce, weigh=truncated),
    ),
    Case(
        "policy_losses finetuning/distillation",
        "verl",
        "compute_policy_loss_reinforce",
        policy_gradient(policy_loss="finetuning/distillation"),
        verl_policy(C.compute_policy_loss_reinforce),
    ),
    Case(
        "policy_losses grpo/gspo",
        "TRL",
        "GRPOTrainer._compute_loss, importance_sampling_level sequence",
        policy_gradient(
            policy_loss={"type": "grpo/gspo", "clip_low": 0.1, "clip_high": 0.2}, loss_aggregation="core/sequence_mean"
        ),
        lambda given: trl_policy(given, "grpo", importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.2),
    ),
    Case(
        "policy_losses grpo/gspo",
        "verl",
        "compute_policy_loss_gspo",
        policy_gradient(policy_loss="grpo/gspo", loss_aggregation="core/sequence_mean", **TIS),
        verl_policy(
            C.compute_policy_loss_gspo,
            "seq-mean-token-mean",
            truncated,
            clip_ratio_low=3e-4,
            clip_ratio_high=4e-4,
        ),
    ),
    Case(
        "policy_losses grpo/gspo",
        "OpenRLHF",
        "PolicyLoss, policy_loss_type gspo",
        policy_gradient(policy_loss="grpo/gspo", loss_aggregation="core/sequence_mean"),
        lambda given: openrlhf_policy(given, policy_loss_type="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4),
    ),
    Case(
        "policy_losses grpo/gmpo",
        "TRL",
        "trl.experimental GMPOTrainer._compute_loss",
        policy_gradient(policy_loss="grpo/gmpo", loss_aggregation="core/sequence_mean"),
        lambda given: trl_policy(given, "gmpo", epsilon=0.4, epsilon_high=0.4),
    ),
    Case(
        "policy_losses grpo/gmpo",
        "verl",
        "compute_policy_loss_geo_mean",
        policy_gradient(
            policy_loss={"type": "grpo/gmpo", "clip_low": 0.1, "clip_high": 0.1}, loss_aggregation="core/sequence_mean"
        ),
        verl_policy(C.compute_policy_loss_geo_mean, clip_ratio_low=0.1, clip_ratio_high=0.1),
    ),
    Case(
        "policy_losses grpo/cispo",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type cispo",
        policy_gradient(policy_loss={"type": "grpo/cispo", "clip_high": 0.1}),
        lambda given: trl_policy(given, "cispo", epsilon_high=1.1),
        note="TRL's epsilon_high is the largest weight itself: 1 + clip_high.",
    ),
    Case(
        "policy_losses grpo/cispo",
        "verl",
        "compute_policy_loss_cispo",
        policy_gradient(policy_loss="grpo/cispo", **TIS),
        verl_policy(C.compute_policy_loss_cispo, "token-mean", truncated, clip_ratio_low=1.0, clip_ratio_high=4.0),
    ),
    Case(
        "policy_losses grpo/sapo",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type sapo",
        policy_gradient(policy_loss="grpo/sapo", loss_aggregation="core/sequence_mean"),
        lambda given: trl_policy(given, "sapo"),
    ),
    Case(
        "policy_losses grpo/sapo",
        "verl",
        "compute_policy_loss_sapo",
        policy_gradient(
            policy_loss={"type": "grpo/sapo", "temperature_positive": 1.3, "temperature_negative": 1.7},
            loss_aggregation="core/sequence_mean",
            **TIS,
        ),
        verl_policy(C.compute_policy_loss_sapo, "seq-mean-token-mean", truncated, tau_pos=1.3, tau_neg=1.7),
    ),
    *(
        Case(
            "policy_losses grpo/dppo",
            "verl",
            f"compute_policy_loss_dppo_{kind}",
            policy_gradient(
                policy_loss={
                    "type": "grpo/dppo",
                    "divergence": kind,
                    "threshold_low": threshold,
                    "threshold_high": threshold,
                    "cap": 1.7,
                }
            ),
            verl_policy(
                function,
                old="behavior",
                clip_ratio=threshold,
                clip_ratio_low=threshold,
                clip_ratio_high=threshold,
                clip_ratio_c=1.7,
            ),
        )
        for kind, function, threshold in (
            ("tv", C.compute_policy_loss_dppo_tv, 0.05),
            ("kl", C.compute_policy_loss_dppo_kl, 0.02),
        )
    ),
    Case(
        "policy_losses grpo/rollout_importance",
        "verl",
        "compute_rollout_correction_weights, compute_policy_loss_reinforce",
        policy_gradient(policy_loss="grpo/rollout_importance"),
        verl_policy(
            C.compute_policy_loss_reinforce, weigh=partial(weights, level="token", threshold="0.8_1.28", of="current")
        ),
        note="verl's bounds belong to the interval, those here do not.",
    ),
    Case(
        "policy_losses grpo/vespo",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type vespo",
        policy_gradient(policy_loss="grpo/vespo"),
        lambda given: trl_policy(given, "vespo", cap=1e9),
        note="TRL truncates the ratio π_prox / μ of each token at 3. Compared without that bound.",
    ),
]

AGGREGATIONS = [
    Case(
        "loss_aggregations core/token_mean",
        "verl",
        "agg_loss, token-mean",
        **aggregated("core/token_mean", lambda values, mask: C.agg_loss(values, mask, "token-mean")),
        shapes=(*SHAPES, *EMPTY),
    ),
    Case(
        "loss_aggregations core/token_mean",
        "OpenRLHF",
        "aggregate_loss, token_level_loss True",
        **aggregated("core/token_mean", openrlhf_losses.aggregate_loss),
        shapes=(*SHAPES, *EMPTY),
    ),
    Case(
        "loss_aggregations core/sequence_mean",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type grpo",
        policy_gradient(loss_aggregation="core/sequence_mean"),
        lambda given: trl_policy(given, "grpo"),
        shapes=(*SHAPES, *EMPTY),
    ),
    *(
        Case("loss_aggregations core/sequence_mean", other, function, **sides, **more)
        for more in ({}, {"differs": EMPTY_ROW, "shapes": EMPTY})
        for other, function, sides in (
            (
                "verl",
                "agg_loss, seq-mean-token-mean",
                aggregated("core/sequence_mean", lambda values, mask: C.agg_loss(values, mask, "seq-mean-token-mean")),
            ),
            (
                "OpenRLHF",
                "aggregate_loss, token_level_loss False",
                aggregated(
                    "core/sequence_mean",
                    lambda values, mask: openrlhf_losses.aggregate_loss(values, mask, token_level_loss=False),
                ),
            ),
        )
    ),
    Case(
        "loss_aggregations core/constant_length",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type dr_grpo",
        policy_gradient(loss_aggregation={"type": "core/constant_length", "length": 64}),
        lambda given: trl_policy(given, "dr_grpo"),
        shapes=(*SHAPES, *EMPTY),
    ),
    *(
        Case(
            "loss_aggregations core/constant_length",
            "verl",
            "agg_loss, seq-mean-token-sum-norm",
            **aggregated(
                "core/constant_length",
                lambda values, mask: C.agg_loss(values, mask, "seq-mean-token-sum-norm", loss_scale_factor=64),
                length=64,
            ),
            **more,
        )
        for more in ({}, {"differs": EMPTY_ROW, "shapes": EMPTY})
    ),
]

ADVANTAGES = [
    Case(
        "advantages grpo/optimal_token_baseline",
        "verl",
        "compute_optimal_token_baseline_advantage, handle_zero_tail",
        advantages("grpo/optimal_token_baseline", tail="return"),
        lambda given: (
            C.compute_multi_turn_optimal_token_baseline_advantage(
                given.rewards, given.mask, given.group, given.proximal, given.squares, handle_zero_tail=True
            )[0]
            * given.mask
        ),
        shapes=SHAPES,
    ),
    Case(
        "advantages grpo/optimal_token_baseline",
        "verl",
        "compute_optimal_token_baseline_advantage",
        advantages("grpo/optimal_token_baseline"),
        lambda given: (
            C.compute_multi_turn_optimal_token_baseline_advantage(
                given.rewards, given.mask, given.group, given.proximal, given.squares, handle_zero_tail=False
            )[0]
            * given.mask
        ),
        shapes=SHAPES,
    ),
    Case(
        "advantages grpo/group_normalized",
        "verl",
        "compute_grpo_outcome_advantage",
        advantages("grpo/group_normalized"),
        by_group(C.compute_grpo_outcome_advantage),
        shapes=TOKENS,
    ),
    Case(
        "advantages grpo/group_centered",
        "verl",
        "compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo False",
        advantages("grpo/group_centered"),
        by_group(C.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        shapes=TOKENS,
    ),
    Case(
        "advantages grpo/leave_one_out",
        "verl",
        "compute_rloo_outcome_advantage",
        advantages("grpo/leave_one_out"),
        by_group(C.compute_rloo_outcome_advantage),
        shapes=TOKENS,
    ),
    Case(
        "advantages grpo/pass_at_k",
        "verl",
        "compute_grpo_passk_outcome_advantage, norm_adv_by_std_in_grpo False",
        advantages("grpo/pass_at_k"),
        by_group(C.compute_grpo_passk_outcome_advantage, config={"norm_adv_by_std_in_grpo": False}),
        note="k is the size of the group: verl has no other.",
        shapes=TOKENS,
    ),
    Case(
        "advantages grpo/reinforce_pp_baseline",
        "verl",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        advantages("grpo/reinforce_pp_baseline"),
        by_group(C.compute_reinforce_plus_plus_baseline_outcome_advantage),
        shapes=TOKENS,
    ),
    *(
        Case(
            "advantages grpo/reinforce_pp",
            "verl",
            "compute_reinforce_plus_plus_outcome_advantage",
            advantages("grpo/reinforce_pp", gamma=gamma),
            verl_advantage(C.compute_reinforce_plus_plus_outcome_advantage, config=SimpleNamespace(gamma=gamma)),
            shapes=TOKENS,
        )
        for gamma in (1.0, 0.9)
    ),
    *(
        Case(
            "advantages grpo/gae",
            "verl",
            f"compute_gae_advantage_return, {column}",
            advantages("grpo/gae", column, gamma=0.9, gae_lambda=0.95, level="token", whiten=True),
            lambda given, index=index: (
                C.compute_gae_advantage_return(given.rewards, given.old_values, given.mask, 0.9, 0.95)[index]
                * given.mask
            ),
            shapes=TOKENS,
        )
        for index, column in enumerate(("advantages", "returns"))
    ),
    Case(
        "advantages grpo/gdpo",
        "verl",
        "compute_gdpo_outcome_advantage",
        advantages("grpo/gdpo", epsilon=1e-6),
        gdpo,
        differs="verl whitens the sum over the tokens in the loss, so long answers count more in its mean and standard "
        "deviation. Here they are over episodes, as in TRL and the paper.",
    ),
    Case(
        "advantages finetuning/teacher_kl",
        "verl",
        "kl_penalty, k1",
        advantages("finetuning/teacher_kl"),
        lambda given: -C.kl_penalty(given.proximal, given.teacher, "k1") * given.mask,
    ),
    Case(
        "advantages finetuning/teacher_kl",
        "OpenRLHF",
        "compute_approx_kl, k1",
        advantages("finetuning/teacher_kl"),
        lambda given: -openrlhf_utils.compute_approx_kl(given.proximal, given.teacher) * given.mask,
        note="OpenRLHF clamps the estimate to ±10.",
    ),
]

CORRECTIONS = [
    Case(
        "corrections grpo/token_truncate",
        "TRL",
        "GRPOTrainer._compute_loss, loss_type dapo",
        policy_gradient(**TIS),
        lambda given: trl_policy(given, cap=2.0),
        note=GIVEN,
    ),
    Case(
        "corrections grpo/token_truncate",
        "verl",
        "compute_rollout_correction_weights, token",
        policy_gradient(**TIS),
        verl_policy(C.compute_policy_loss_vanilla, "token-mean", truncated),
    ),
    Case(
        "corrections grpo/token_truncate",
        "OpenRLHF",
        "PolicyLoss, is_correction_mode clip",
        policy_gradient(**TIS),
        lambda given: openrlhf_policy(
            given, is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0.0, 2.0]
        ),
    ),
    Case(
        "corrections grpo/token_mask",
        "verl",
        "compute_rollout_correction_weights, token with two bounds",
        policy_gradient(corrections=[{"type": "grpo/token_mask", "low": 0.7, "high": 1.5}]),
        verl_policy(C.compute_policy_loss_vanilla, "token-mean", partial(weights, level="token", threshold="0.7_1.5")),
    ),
    Case(
        "corrections grpo/token_mask",
        "OpenRLHF",
        "PolicyLoss, is_correction_mode mask",
        policy_gradient(corrections=[{"type": "grpo/token_mask", "low": 0.7, "high": 1.5}]),
        lambda given: openrlhf_policy(given, is_correction_level="token", is_correction_threshold=[0.7, 1.5]),
    ),
    Case(
        "corrections grpo/sequence_truncate",
        "verl",
        "compute_rollout_correction_weights, sequence",
        policy_gradient(corrections=[{"type": "grpo/sequence_truncate", "cap": 1.5}]),
        verl_policy(C.compute_policy_loss_vanilla, "token-mean", partial(weights, level="sequence", threshold=1.5)),
    ),
    *(
        Case(
            f"corrections grpo/{name}",
            "verl",
            f"compute_rollout_rejection_mask, {option}",
            policy_gradient(corrections=[{"type": f"grpo/{name}", "low": 1 / high, "high": high}]),
            verl_rejection(option, str(high), keep_denominator=not differs),
            note="" if differs else KEPT,
            differs=differs,
        )
        for name, option, high in (("geometric_mask", "seq_mean_k1", 1.1), ("product_mask", "seq_sum_k1", 3.0))
        for differs in ("", "verl removes rejected tokens from the denominator; here they stay in it.")
    ),
    Case(
        "corrections grpo/geometric_mask",
        "OpenRLHF",
        "PolicyLoss, is_correction_level seq",
        policy_gradient(
            corrections=[
                {"type": "grpo/geometric_mask", "low": 0.9, "high": 1.1},
                {"type": "grpo/token_truncate", "cap": 1e9},
            ]
        ),
        lambda given: openrlhf_policy(given, is_correction_level="seq", is_correction_threshold=[0.9, 1.1]),
        note="OpenRLHF also weights kept tokens by ρ, which is token_truncate without a cap.",
    ),
    *(
        Case(
            "corrections grpo/opsm",
            "TRL",
            f"GRPOTrainer._compute_loss, off_policy_mask_threshold{', beta' if beta else ''}",
            policy_gradient(corrections=[{"type": "grpo/opsm", "threshold": 0.05}], regularizers=regularizers),
            lambda given, beta=beta: trl_policy(given, off_policy_mask_threshold=0.05, beta=beta),
        )
        for beta, regularizers in (
            (0.0, []),
            (0.3, [{"type": "grpo/reference_kl", "coefficient": 0.3}]),
        )
    ),
    Case(
        "corrections grpo/kpop",
        "OpenRLHF",
        "PolicyLoss, is_correction_gating binary_kl",
        policy_gradient(corrections=[{"type": "grpo/kpop", "threshold": 0.05}]),
        lambda given: openrlhf_policy(
            given,
            is_correction_level="token",
            is_correction_gating="binary_kl",
            is_correction_threshold=[0.0, 0.05],
        ),
        differs="OpenRLHF bounds KL(μ ‖ π_prox) alone; here the larger one of both directions counts.",
    ),
    Case(
        "corrections grpo/ipo_mask",
        "OpenRLHF",
        "PolicyLoss, is_correction_gating tv",
        policy_gradient(
            corrections=[{"type": "grpo/ipo_mask", "threshold": 0.05}, {"type": "grpo/token_truncate", "cap": 1e9}]
        ),
        lambda given: openrlhf_policy(
            given, is_correction_level="token", is_correction_gating="tv", is_correction_threshold=[0.0, 0.05]
        ),
        note="OpenRLHF compares μ with π_prox, and weights kept tokens by ρ. Compared in the first update on a batch, "
        "where π is π_prox.",
        shapes=(Shape(on_policy=True),),
    ),
]


def with_kl(estimator: str, **more: Any) -> Callable[[Sample], torch.Tensor]:
    """Return areal's loss with a penalty towards the reference."""
    return policy_gradient(
        regularizers=[{"type": "grpo/reference_kl", "coefficient": 0.3, "estimator": estimator}], **more
    )


REGULARIZERS = [
    Case(
        "regularizers grpo/reference_kl",
        "TRL",
        "GRPOTrainer._compute_loss, beta",
        with_kl("unbiased"),
        lambda given: trl_policy(given, beta=0.3),
    ),
    Case(
        "regularizers grpo/reference_kl",
        "TRL",
        "GRPOTrainer._compute_loss, use_bias_correction_kl False",
        with_kl("k3"),
        lambda given: trl_policy(given, beta=0.3, use_bias_correction_kl=False),
    ),
    Case(
        "regularizers grpo/reference_kl",
        "TRL",
        "GRPOTrainer._compute_loss, beta with importance weights",
        with_kl("unbiased", **TIS),
        lambda given: trl_policy(given, beta=0.3, cap=2.0),
        differs="Corrections weight the penalty, too: its expectation is under the policy that sampled. TRL weights "
        "the policy's loss alone.",
    ),
    *(
        Case(
            "regularizers grpo/reference_kl",
            "verl",
            f"kl_penalty, {estimator}",
            with_kl(estimator),
            lambda given, estimator=estimator: (
                verl_policy(C.compute_policy_loss_vanilla)(given)
                + 0.3 * C.agg_loss(C.kl_penalty(given.current, given.reference, estimator), given.mask, "token-mean")
            ),
            note="verl clamps k3 to 10." if estimator == "k3" else "",
        )
        for estimator in ("k2", "k3")
    ),
    *(
        Case(
            "regularizers grpo/reference_kl",
            "OpenRLHF",
            f"compute_approx_kl, {estimator}",
            with_kl(estimator),
            lambda given, estimator=estimator: (
                openrlhf_policy(given)
                + 0.3
                * openrlhf_losses.aggregate_loss(
                    openrlhf_utils.compute_approx_kl(given.current, given.reference, kl_estimator=estimator), given.mask
                )
            ),
            note="OpenRLHF clamps the estimate to ±10.",
        )
        for estimator in ("k2", "k3")
    ),
    Case(
        "regularizers grpo/entropy_bonus",
        "TRL",
        "GRPOTrainer._compute_loss, entropy_coef",
        policy_gradient(regularizers=[{"type": "grpo/entropy_bonus", "coefficient": 0.07}]),
        lambda given: trl_policy(given, entropy_coef=0.07),
    ),
    *(
        Case(
            component,
            "TRL",
            "GRPOTrainer._compute_loss, use_adaptive_entropy",
            policy_gradient(
                minibatch_transforms=[{"type": "grpo/entropy_target", "target": 2.0, "step": 0.05}],
                regularizers=["grpo/adaptive_entropy"],
            ),
            lambda given: trl_policy(
                given, calls=2, use_adaptive_entropy=True, entropy_target=2.0, entropy_coef_delta=0.05
            ),
            note="TRL uses the coefficient from before its change: its second update has the coefficient of the first "
            "one here.",
        )
        for component in ("regularizers grpo/adaptive_entropy", "batch_transforms grpo/entropy_target")
    ),
]

REWARDS = [
    Case(
        "batch_transforms grpo/kl_in_reward",
        "verl",
        "compute_rewards",
        transformed("grpo/kl_in_reward", "token_rewards", coefficient=0.1),
        lambda given: C.compute_rewards(0.0, given.proximal, given.reference, 0.1) * given.mask,
    ),
    Case(
        "batch_transforms grpo/kl_in_reward",
        "verl",
        "AdaptiveKLController",
        transformed("grpo/kl_in_reward", "kl_in_reward/coefficient", coefficient=0.1, target=3.0, horizon=100),
        verl_adaptive_kl,
        note="Both adapt to the KL of an episode, the sum over its tokens.",
    ),
    Case(
        "batch_transforms grpo/kl_in_reward",
        "OpenRLHF",
        "compute_reward, compute_approx_kl k1",
        transformed("grpo/kl_in_reward", "token_rewards", coefficient=0.1),
        lambda given: (
            openrlhf_utils.compute_reward(
                torch.zeros(len(given.mask)),
                0.1,
                openrlhf_utils.compute_approx_kl(given.proximal, given.reference),
                given.mask,
            )
            * given.mask
        ),
    ),
    Case(
        "reward_shaping grpo/overlong_penalty",
        "TRL",
        "trl.rewards.get_soft_overlong_punishment",
        shaped("grpo/overlong_penalty", torch.zeros(len(LENGTHS)), max_length=32, buffer=16),
        lambda given: overlong(list(LENGTHS), 32, 16),
    ),
    Case(
        "reward_shaping grpo/reward_bounds",
        "OpenRLHF",
        "compute_reward, reward_clip_range",
        shaped("grpo/reward_bounds", RAW, low=-1.0, high=2.0),
        lambda given: openrlhf_utils.compute_reward(
            RAW, 0.0, torch.zeros(len(RAW), 1), torch.ones(len(RAW), 1), (-1.0, 2.0)
        )[:, 0],
    ),
    Case(
        "auxiliary_losses grpo/value_regression",
        "verl",
        "compute_value_loss",
        value_regression,
        lambda given: C.compute_value_loss(given.values, given.returns, given.old_values, given.mask, 0.2)[0],
    ),
    Case(
        "auxiliary_losses grpo/value_regression",
        "OpenRLHF",
        "ValueLoss",
        value_regression,
        lambda given: openrlhf_losses.ValueLoss(0.2)(given.values, given.old_values, given.returns, given.mask),
    ),
]


def openrlhf_dpo(**settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return OpenRLHF's `DPOLoss` of the answers' log-probabilities."""
    return lambda given: openrlhf_losses.DPOLoss(0.3, **settings)(
        *given.sums(given.current), *given.sums(given.reference)
    )[0]


def openrlhf_reward_model(given: Sample) -> torch.Tensor:
    """Return OpenRLHF's `PairWiseLoss` of the scores at the last tokens, with margins."""
    scores = given.sides(given.passes["values"][given.batch.tokens.offsets[1:] - 1])
    return openrlhf_losses.PairWiseLoss()(*scores, given.sides(given.batch["margin"])[0])


def composed(
    estimate: Callable[[Sample], torch.Tensor],
    function: Callable[..., Any],
    aggregation: str = "token-mean",
    old: str = "proximal",
    **settings: Any,
) -> Callable[[Sample], torch.Tensor]:
    """Return verl's loss with verl's advantages: a whole algorithm."""
    parts = {"weigh": None if old == "behavior" else truncated, "old": old}
    return verl_policy(function, aggregation, advantages=estimate, **parts, **settings)


ALGORITHMS = [
    Case(
        "algorithms grpo/grpo",
        "verl",
        "compute_grpo_outcome_advantage, compute_policy_loss_vanilla",
        loss("grpo/grpo"),
        composed(by_group(C.compute_grpo_outcome_advantage), C.compute_policy_loss_vanilla),
        note="With importance weights of both, truncated at 2.",
    ),
    Case(
        "algorithms grpo/rloo",
        "verl",
        "compute_rloo_outcome_advantage, compute_policy_loss_reinforce",
        loss("grpo/rloo"),
        composed(by_group(C.compute_rloo_outcome_advantage), C.compute_policy_loss_reinforce, "seq-mean-token-sum"),
        tolerance=1e-5,  # sums over sequences are in the tens
    ),
    Case(
        "algorithms grpo/reinforce_pp",
        "verl",
        "compute_reinforce_plus_plus_outcome_advantage, compute_policy_loss_vanilla",
        loss("grpo/reinforce_pp"),
        composed(
            verl_advantage(C.compute_reinforce_plus_plus_outcome_advantage, config=SimpleNamespace(gamma=1.0)),
            C.compute_policy_loss_vanilla,
        ),
    ),
    Case(
        "algorithms grpo/dppo",
        "verl",
        "compute_grpo_outcome_advantage, compute_policy_loss_dppo_tv",
        loss("grpo/dppo"),
        composed(
            by_group(C.compute_grpo_outcome_advantage),
            C.compute_policy_loss_dppo_tv,
            old="behavior",
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_ratio_c=20.0,
        ),
    ),
    Case(
        "algorithms grpo/ppo",
        "verl",
        "compute_gae_advantage_return, compute_policy_loss_vanilla",
        loss("grpo/ppo", advantage={"type": "grpo/gae", "gamma": 0.9, "gae_lambda": 0.95}),
        composed(
            lambda given: C.compute_gae_advantage_return(given.rewards, given.old_values, given.mask, 0.9, 0.95)[0],
            C.compute_policy_loss_vanilla,
        ),
        note="The policy's loss. The critic's is value_regression.",
    ),
    Case(
        "algorithms finetuning/distill",
        "verl",
        "kl_penalty k1, compute_policy_loss_reinforce",
        loss("finetuning/distill"),
        composed(
            lambda given: -C.kl_penalty(given.proximal, given.teacher, "k1") * given.mask,
            C.compute_policy_loss_reinforce,
        ),
    ),
]
FINE_TUNING = [
    Case(
        "algorithms finetuning/sft",
        "OpenRLHF",
        "SFTLoss",
        loss("finetuning/sft"),
        lambda given: openrlhf_losses.SFTLoss()(given.current, given.mask),
    ),
    *(
        Case(
            f"algorithms finetuning/{name}",
            "OpenRLHF",
            function,
            loss(f"finetuning/{name}", beta=0.3, **ours),
            openrlhf_dpo(**theirs),
            shapes=PAIRS,
            tolerance=1e-5 if name == "dpo" else 1e-4,  # the squares of sums over tokens are in the hundreds
            **more,
        )
        for name, function, ours, theirs, more in (
            ("dpo", "DPOLoss", {}, {}, {}),
            ("dpo", "DPOLoss, label_smoothing", {"label_smoothing": 0.2}, {"label_smoothing": 0.2}, {}),
            ("ipo", "DPOLoss, ipo", {}, {"ipo": True}, {}),
        )
    ),
    Case(
        "algorithms finetuning/simpo",
        "TRL",
        "trl.experimental CPOTrainer.cpo_loss, loss_type simpo",
        loss("finetuning/simpo", beta=2.0, gamma=1.0),
        lambda given: simpo(given, loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0),
        shapes=PAIRS,
    ),
    Case(
        "algorithms finetuning/orpo",
        "TRL",
        "trl.experimental ORPOTrainer.odds_ratio_loss",
        loss("finetuning/orpo", weight=0.3),
        lambda given: odds_ratio(given, 0.3),
        note="The first term is the paper's on both sides. TRL's trainer averages it over all tokens of prompts and "
        "chosen answers instead.",
        shapes=PAIRS,
    ),
    Case(
        "algorithms finetuning/reward_model",
        "OpenRLHF",
        "PairWiseLoss, with margins",
        loss("finetuning/reward_model"),
        openrlhf_reward_model,
        shapes=PAIRS,
    ),
]

CASES = [
    *ALGORITHMS,
    *POLICY_LOSSES,
    *CORRECTIONS,
    *REGULARIZERS,
    *AGGREGATIONS,
    *ADVANTAGES,
    *REWARDS,
    *FINE_TUNING,
]
