"""Components for algorithms, policy losses, corrections and regularizers, for `plugin`. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset

_POLICY_GRADIENT = "areal_core.algorithms.composition:PolicyGradient"


def _algorithm(name: str, summary: str, settings: str) -> Component:
    """Return the component of an algorithm, which consists of its settings."""
    return Component(name, summary, target=_POLICY_GRADIENT, config=f"areal_grpo.config:{settings}")


def _part(name: str, summary: str, target: str, settings: str | None) -> Component:
    """Return the component of a function of the same name in module `target` of this package, with its settings."""
    config = f"areal_grpo.{settings}" if settings else "areal_core.config:NoSettings"
    return Component(name, summary, target=f"areal_grpo.{target}:{name}", config=config)


ALGORITHMS = [
    _algorithm("grpo", "rewards normalized within the group, clipped ratios", "GRPOSettings"),
    _algorithm("dr_grpo", "GRPO without its two biases: no standard deviation, a constant length", "DrGRPOSettings"),
    _algorithm(
        "dapo", "GRPO with a wider upper clip range, and without groups whose rewards are all equal", "DAPOSettings"
    ),
    _algorithm("gspo", "GRPO with one ratio for the whole sequence", "GSPOSettings"),
    _algorithm("gmpo", "GRPO with the geometric mean of a sequence's ratios, each clipped", "GMPOSettings"),
    _algorithm(
        "cispo", "GRPO in which the clipped ratio is a weight, so that every token keeps its gradient", "CISPOSettings"
    ),
    _algorithm("sapo", "GRPO with a soft gate instead of clipping", "SAPOSettings"),
    _algorithm("rloo", "REINFORCE with the mean reward of the group's other answers as the baseline", "RLOOSettings"),
    _algorithm(
        "reinforce_pp",
        "no group and no critic: returns whitened over the batch, clipped ratios",
        "ReinforcePPSettings",
    ),
    _algorithm(
        "lite_ppo",
        "rewards minus the group's mean, divided by the batch's standard deviation; clipped ratios",
        "LitePPOSettings",
    ),
    _algorithm(
        "m2po",
        "importance sampling far off policy: an update masks the tokens that have moved furthest and would move on",
        "M2POSettings",
    ),
    _algorithm(
        "dppo", "a trust region of probabilities instead of ratios, around the policy that sampled", "DPPOSettings"
    ),
    _algorithm("ppo", "a critic trained together with the policy, clipped ratios", "PPOSettings"),
]

POLICY_LOSSES = [
    _part(
        "ppo_clip",
        "PPO's clipped ratio, with a clip range for each side and an optional dual clip",
        "losses",
        "loss_settings:PPOClipSettings",
    ),
    _part(
        "reinforce",
        "the plain policy gradient, for one update per batch",
        "losses",
        "loss_settings:ReinforceSettings",
    ),
    _part("gspo", "one clipped ratio for the whole sequence", "sequence_losses", "loss_settings:GSPOLossSettings"),
    _part(
        "gmpo",
        "the geometric mean of a sequence's ratios, each of them clipped",
        "sequence_losses",
        "loss_settings:GMPOLossSettings",
    ),
    _part(
        "cispo",
        "log-probabilities weighted by the clipped ratio, so that clipping removes no gradient",
        "weighted_losses",
        "loss_settings:CISPOLossSettings",
    ),
    _part("sapo", "a soft gate instead of PPO's clipping", "losses", "loss_settings:SAPOLossSettings"),
    _part(
        "dppo",
        "a trust region of probabilities around the policy that sampled; steps out of it are masked",
        "weighted_losses",
        "loss_settings:DPPOLossSettings",
    ),
    _part(
        "rollout_importance",
        "the ratio to the policy that sampled as a weight; tokens with a ratio out of bounds are masked",
        "weighted_losses",
        "loss_settings:RolloutImportanceSettings",
    ),
    _part(
        "vespo",
        "log-probabilities weighted by a Gamma function of the sequence's ratio to the policy that sampled (VESPO)",
        "weighted_losses",
        "loss_settings:VESPOLossSettings",
    ),
    _part(
        "score_centering",
        "the policy gradient minus its expectation under the policy that sampled (score centering)",
        "score_centering",
        "loss_settings:ScoreCenteringSettings",
    ),
]

CORRECTIONS = [
    _part(
        "token_truncate",
        "each token's importance weight, capped (TIS)",
        "corrections",
        "correction_settings:TokenTruncateSettings",
    ),
    _part(
        "token_mask",
        "each token's importance weight; tokens with a weight out of bounds are masked (IcePop)",
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
        "masks sequences whose geometric mean of ratios is out of bounds",
        "sequence_corrections",
        "correction_settings:GeometricMaskSettings",
    ),
    _part(
        "product_mask",
        "masks sequences whose product of ratios is out of bounds",
        "sequence_corrections",
        "correction_settings:ProductMaskSettings",
    ),
    _part(
        "veto",
        "masks sequences with a token that has become far less likely since it was sampled",
        "sequence_corrections",
        "correction_settings:VetoSettings",
    ),
    _part(
        "opsm",
        "masks sequences with a negative advantage that the policy has moved away from (DeepSeek-V3.2)",
        "sequence_corrections",
        "correction_settings:OPSMSettings",
    ),
    _part(
        "kpop",
        "each token's importance weight; tokens over a divergence between the two policies are masked",
        "corrections",
        "correction_settings:KPopSettings",
    ),
    _part(
        "ipo_mask",
        "masks tokens whose probability differs too much between the current policy and the one that sampled (IPO)",
        "corrections",
        "correction_settings:IPOMaskSettings",
    ),
]

MINIBATCH_TRANSFORMS = [
    _part(
        "m2po",
        "masks the tokens that have moved furthest and would move on, up to a bound on the second moment (M2PO)",
        "minibatch_transforms",
        "loss_settings:M2POTransformSettings",
    ),
    _part(
        "entropy_target",
        "adapts the coefficient of adaptive_entropy so that the policy keeps a target entropy",
        "minibatch_transforms",
        "loss_settings:EntropyTargetSettings",
    ),
]

REGULARIZERS = [
    _part(
        "reference_kl",
        "a KL penalty towards a reference model",
        "regularizers",
        "loss_settings:ReferenceKLSettings",
    ),
    _part(
        "entropy_bonus",
        "an entropy bonus with a fixed coefficient",
        "regularizers",
        "loss_settings:EntropyBonusSettings",
    ),
    _part(
        "adaptive_entropy",
        "an entropy bonus whose coefficient the minibatch transform entropy_target sets",
        "regularizers",
        "loss_settings:AdaptiveEntropySettings",
    ),
]

PRESETS = [
    Preset(record.name, record.summary, path=f"areal_grpo:presets/{record.name}.yaml", plugins=("hf", "fsdp", "view"))
    for record in ALGORITHMS
]
"""Complete run of each algorithm on the demonstration's task."""
