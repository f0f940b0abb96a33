"""The records of algorithms, policy losses, corrections and regularizers, for `plugin`. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset

_POLICY_GRADIENT = "areal_core.algorithms.composition:PolicyGradient"


def _algorithm(name: str, summary: str, settings: str) -> Component:
    """A composition: its settings are all there is of it."""
    return Component(name, summary, target=_POLICY_GRADIENT, config=f"areal_grpo.config:{settings}")


def _part(name: str, summary: str, target: str, settings: str | None) -> Component:
    """A function of its record's name, in module `target`, and its settings, both of this package."""
    config = f"areal_grpo.{settings}" if settings else "areal_core.config:NoSettings"
    return Component(name, summary, target=f"areal_grpo.{target}:{name}", config=config)


ALGORITHMS = [
    _algorithm("grpo", "rewards normalized within a prompt's answers, ratios clipped", "GRPOSettings"),
    _algorithm("dr_grpo", "GRPO without its two biases: no standard deviation, a constant length", "DrGRPOSettings"),
    _algorithm("dapo", "GRPO with a wider upper bound, and no group that teaches nothing", "DAPOSettings"),
    _algorithm("gspo", "GRPO with one ratio for a whole sequence", "GSPOSettings"),
    _algorithm("gmpo", "GRPO with the geometric mean of a sequence's ratios, each clipped", "GMPOSettings"),
    _algorithm("cispo", "GRPO in which the ratio is a bounded weight, and every token has a gradient", "CISPOSettings"),
    _algorithm("sapo", "GRPO with a soft gate in place of clipping", "SAPOSettings"),
    _algorithm("rloo", "REINFORCE with the other answers' mean reward as the baseline", "RLOOSettings"),
    _algorithm(
        "reinforce_pp",
        "no group and no critic: rewards from each token on, whitened over the batch, ratios clipped",
        "ReinforcePPSettings",
    ),
    _algorithm("lite_ppo", "the group's mean, the batch's standard deviation, ratios clipped", "LitePPOSettings"),
    _algorithm(
        "m2po",
        "importance sampling far off policy: an update leaves out the tokens that have moved most and would move on",
        "M2POSettings",
    ),
    _algorithm(
        "dppo", "a trust region of probabilities, not of ratios, around the policy that sampled", "DPPOSettings"
    ),
    _algorithm("ppo", "a critic that learns beside the policy, ratios clipped", "PPOSettings"),
]

POLICY_LOSSES = [
    _part(
        "ppo_clip",
        "the clipped ratio of PPO, bounds of its own for each side, optionally dual",
        "losses",
        "loss_settings:PPOClipSettings",
    ),
    _part(
        "reinforce",
        "the plain policy gradient, for one update a batch",
        "losses",
        "loss_settings:ReinforceSettings",
    ),
    _part("gspo", "one clipped ratio for a whole sequence", "sequence_losses", "loss_settings:GSPOLossSettings"),
    _part(
        "gmpo",
        "the geometric mean of a sequence's ratios, each of them clipped",
        "sequence_losses",
        "loss_settings:GMPOLossSettings",
    ),
    _part(
        "cispo",
        "log-probabilities weighed by a bounded ratio: clipping takes no gradient away",
        "weighted_losses",
        "loss_settings:CISPOLossSettings",
    ),
    _part("sapo", "a soft gate where PPO clips", "losses", "loss_settings:SAPOLossSettings"),
    _part(
        "dppo",
        "no step out of a trust region of probabilities around the policy that sampled",
        "weighted_losses",
        "loss_settings:DPPOLossSettings",
    ),
    _part(
        "rollout_importance",
        "the ratio to the policy that sampled, and no token whose ratio is out of bounds",
        "weighted_losses",
        "loss_settings:RolloutImportanceSettings",
    ),
]

CORRECTIONS = [
    _part(
        "token_truncate",
        "each token's importance weight, capped",
        "corrections",
        "correction_settings:TokenTruncateSettings",
    ),
    _part(
        "token_mask",
        "each token's importance weight, and no token whose weight is out of bounds",
        "corrections",
        "correction_settings:TokenMaskSettings",
    ),
    _part(
        "sequence_truncate",
        "each sequence's importance weight, capped",
        "sequence_corrections",
        "correction_settings:SequenceTruncateSettings",
    ),
    _part(
        "geometric_mask",
        "no sequence whose mean importance weight is out of bounds",
        "sequence_corrections",
        "correction_settings:GeometricMaskSettings",
    ),
    _part(
        "product_mask",
        "no sequence whose importance weight is out of bounds",
        "sequence_corrections",
        "correction_settings:ProductMaskSettings",
    ),
    _part(
        "veto",
        "no sequence with a token that the learning policy would never write",
        "sequence_corrections",
        "correction_settings:VetoSettings",
    ),
    _part(
        "opsm",
        "no sequence with a negative advantage that the policy has moved away from (DeepSeek-V3.2)",
        "sequence_corrections",
        "correction_settings:OPSMSettings",
    ),
    _part(
        "kpop",
        "each token's importance weight, and no token whose divergence between the two policies is over a bound",
        "corrections",
        "correction_settings:KPopSettings",
    ),
]

MINIBATCH_TRANSFORMS = [
    _part(
        "m2po",
        "leaves out of an update the tokens that have moved most and would move on, up to a second moment (M2PO)",
        "minibatch_transforms",
        "loss_settings:M2POTransformSettings",
    ),
    _part(
        "entropy_target",
        "leads the coefficient of adaptive_entropy so that the policy keeps its entropy",
        "minibatch_transforms",
        "loss_settings:EntropyTargetSettings",
    ),
]

REGULARIZERS = [
    _part(
        "reference_kl",
        "a penalty on the distance from a reference model",
        "regularizers",
        "loss_settings:ReferenceKLSettings",
    ),
    _part("entropy_bonus", "rewards an undecided policy", "regularizers", "loss_settings:EntropyBonusSettings"),
    _part(
        "adaptive_entropy",
        "an entropy bonus whose coefficient the minibatch transform entropy_target leads",
        "regularizers",
        "loss_settings:AdaptiveEntropySettings",
    ),
]

PRESETS = [
    Preset(record.name, record.summary, path=f"areal_grpo:presets/{record.name}.yaml", plugins=("hf", "fsdp", "view"))
    for record in ALGORITHMS
]
"""A complete run of each algorithm on the demonstration's task."""
