"""Components of this plugin: fine-tuning algorithms and their parts. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, Preset, hookimpl


@hookimpl
def areal_algorithms() -> list[Component]:
    """Algorithms that train on a data set as it is, or on a teacher."""
    return [
        Component(
            "sft",
            "supervised fine-tuning on the rows of a data set",
            target="areal_finetuning.supervised:Supervised",
            config="areal_finetuning.config:SupervisedSettings",
        ),
        Component(
            "dpo",
            "direct preference optimization: makes chosen answers more likely than rejected ones",
            target="areal_finetuning.preferences:Preferences",
            config="areal_finetuning.config:DPOSettings",
        ),
        Component(
            "ipo",
            "DPO with a squared loss, which is bounded when labels do not contradict each other",
            target="areal_finetuning.preferences:Preferences",
            config="areal_finetuning.config:IPOSettings",
        ),
        Component(
            "simpo",
            "compares mean log-probabilities of chosen and rejected answers, with a margin and without a reference",
            target="areal_finetuning.preferences:SimPO",
            config="areal_finetuning.config:SimPOSettings",
        ),
        Component(
            "orpo",
            "supervised fine-tuning on chosen answers with a penalty on the odds of rejected ones, without a reference",
            target="areal_finetuning.preferences:ORPO",
            config="areal_finetuning.config:ORPOSettings",
        ),
        Component(
            "kto",
            "makes answers labeled as desirable more likely, and undesirable ones less likely",
            target="areal_finetuning.kto:KTO",
            config="areal_finetuning.config:KTOSettings",
        ),
        Component(
            "reward_model",
            "trains a model to score sequences, on chosen and rejected ones (Bradley-Terry)",
            target="areal_finetuning.reward_model:RewardModel",
            config="areal_finetuning.config:RewardModelSettings",
        ),
        Component(
            "distill",
            "on-policy distillation: the policy generates, and a teacher scores every token",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_finetuning.config:DistillSettings",
        ),
        Component(
            "gkd",
            "distillation of whole distributions, on generated answers or on rows of a data set",
            target="areal_finetuning.distillation:GeneralizedDistillation",
            config="areal_finetuning.config:GKDSettings",
        ),
        Component(
            "sdpo",
            "self-distillation: the policy learns from itself given a correct answer or feedback (SDPO)",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_finetuning.self_distillation_config:SDPOSettings",
        ),
    ]


@hookimpl
def areal_workflows() -> list[Component]:
    """Workflows whose episodes have more than the policy needs."""
    return [
        Component(
            "self_distillation",
            "one turn of text, and the prompt that the model gets as its own teacher",
            target="areal_finetuning.self_distillation:SelfDistillation",
            config="areal_finetuning.self_distillation_config:SelfDistillationSettings",
        )
    ]


@hookimpl
def areal_group_filters() -> list[Component]:
    """Functions for finished groups."""
    return [
        Component(
            "teacher_prompts",
            "writes the prompt of each answer's teacher, with a correct answer of the same group; drops nothing",
            target="areal_finetuning.self_distillation:teacher_prompts",
            config="areal_finetuning.self_distillation_config:TeacherPromptsSettings",
        )
    ]


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """Functions that compute columns of a batch before its advantages."""
    return [
        Component(
            "self_teacher",
            "log-probabilities of the sampled tokens under the model or its average, given the teacher's prompt",
            target="areal_finetuning.self_teacher:self_teacher",
            config="areal_finetuning.self_distillation_config:SelfTeacherSettings",
        )
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """Advantages from a teacher."""
    return [
        Component(
            "teacher_kl",
            "log-probability of each token under the teacher minus that under the policy",
            target="areal_finetuning.distillation:teacher_kl",
            config="areal_finetuning.config:TeacherKLSettings",
        ),
        Component(
            "self_distillation",
            "log-probability of each token under the self-teacher minus that under the policy; may add rewards",
            target="areal_finetuning.self_teacher:SelfDistillationAdvantage",
            config="areal_finetuning.self_distillation_config:SelfDistillationAdvantageSettings",
        ),
    ]


@hookimpl
def areal_policy_losses() -> list[Component]:
    """Losses of single tokens."""
    return [
        Component(
            "distillation",
            "the plain policy gradient, for one update per batch; logs the distance from the teacher",
            target="areal_finetuning.distillation:distillation",
            config="areal_finetuning.config:DistillationSettings",
        ),
        Component(
            "self_distillation",
            "the plain policy gradient, for one update per batch; logs the distance from the self-teacher",
            target="areal_finetuning.distillation:distillation",
            config="areal_finetuning.self_distillation_config:SelfDistillationLossSettings",
        ),
    ]


@hookimpl
def areal_reward_functions() -> list[Component]:
    """Rewards for workflows whose algorithm uses no reward."""
    target, config = "areal_finetuning.rewards:no_reward", "areal_core.config:NoSettings"
    return [
        Component("no_reward", "0 for every answer", target=target, config=config),
        Component(
            "place",
            "place of a value of the row in a list, which chooses the row's teacher",
            target="areal_finetuning.rewards:place",
            config="areal_finetuning.config:PlaceSettings",
        ),
    ]


@hookimpl
def areal_train_engines() -> list[Component]:
    """Engine of frozen models that other programs serve."""
    return [
        Component(
            "served",
            "asks servers for log-probabilities: a frozen teacher or reference behind an address",
            target="areal_finetuning.served:ServedEngine",
            config="areal_finetuning.config:ServedSettings",
        )
    ]


@hookimpl
def areal_example_tokenizers() -> list[Component]:
    """Example tokenizers."""
    settings = "areal_finetuning.config:EncodingSettings"
    return [
        Component(
            "conversations",
            "rows with messages, or with prompt and completion; trains on the assistant's messages",
            target="areal_finetuning.example_tokenizers:conversations",
            config=settings,
        ),
        Component(
            "preferences",
            "rows with chosen and rejected, and with prompt unless both begin with it; returns a pair of sequences",
            target="areal_finetuning.example_tokenizers:preferences",
            config=settings,
        ),
        Component(
            "labeled",
            "rows with prompt, completion and label; returns a sequence with is_desirable",
            target="areal_finetuning.example_tokenizers:labeled",
            config=settings,
        ),
    ]


@hookimpl
def areal_presets() -> list[Preset]:
    """Complete configs to start with. Each needs a model and rows."""
    others = ("fsdp", "rewards", "view")
    return [
        Preset(
            "sft",
            "supervised fine-tuning on the rows of a data set",
            path="areal_finetuning:presets/sft.yaml",
            plugins=others,
        ),
        Preset(
            "dpo",
            "direct preference optimization: makes chosen answers more likely than rejected ones",
            path="areal_finetuning:presets/dpo.yaml",
            plugins=others,
        ),
        Preset(
            "kto",
            "makes answers labeled as desirable more likely, and undesirable ones less likely",
            path="areal_finetuning:presets/kto.yaml",
            plugins=others,
        ),
        Preset(
            "reward_model",
            "trains a model to score sequences, on chosen and rejected ones (Bradley-Terry)",
            path="areal_finetuning:presets/reward_model.yaml",
            plugins=others,
        ),
        Preset(
            "distill",
            "on-policy distillation: the policy generates, and a teacher scores every token",
            path="areal_finetuning:presets/distill.yaml",
            plugins=(*others, "grpo", "hf"),
        ),
        Preset(
            "sdpo",
            "self-distillation: the policy learns from itself given a correct answer or feedback (SDPO)",
            path="areal_finetuning:presets/sdpo.yaml",
            plugins=(*others, "grpo", "hf"),
        ),
        Preset(
            "defaults",
            "what areal_core.train() uses for what a call leaves out",
            path="areal_finetuning:presets/defaults.yaml",
            plugins=("fsdp", "view"),
        ),
    ]
