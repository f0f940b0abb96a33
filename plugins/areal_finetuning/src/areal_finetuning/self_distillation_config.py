"""Settings of self-distillation. This module does not import torch, so that configs can be checked anywhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field, field_validator

from areal_core.chat import PromptSettings, prompt_of
from areal_core.config import Selection, Settings, component
from areal_core.sdk import (
    ACTOR,
    EMA,
    BatchTransformSettings,
    ForwardPass,
    PolicyGradientSettings,
    PolicyLossSettings,
    Role,
    RowError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig

WORKFLOW: Final = "finetuning/self_distillation"
"""The workflow whose episodes can write the prompt of a teacher."""
_PLACES: Final = {
    "prompt_template": {"prompt", "solution", "feedback"},
    "solution_template": {"solution"},
    "feedback_template": {"feedback"},
}
"""Names that each template may have in braces."""


class SelfDistillationSettings(Settings):
    """One question, one answer, one score, and the prompt that the model gets as its own teacher.

    The teacher's prompt is the question with a correct answer to it, with feedback on the model's own answer, or with
    both. The group filter `finetuning/teacher_prompts` chooses the correct answer.
    """

    scores_answers: ClassVar[bool] = True

    workflow: Selection = component(
        "workflows",
        default="core/single_turn",
        description="Workflow of one turn of text that generates and scores an answer.",
    )
    feedback: Selection | None = component(
        "environments",
        description="Environment whose observation after an answer is the feedback on it, such as an error message. "
        "Its reward is not used; an episode without an observation has no feedback. null: no feedback.",
    )
    solution_key: str | None = Field(
        None,
        description="Key of the row with the text of a correct answer. The teacher gets it if no other answer of the "
        "group is correct. null: only answers of the group.",
    )
    prompt_template: str = Field(
        "{prompt}{solution}{feedback}\n\nNow answer the question correctly.",
        description="The last message of the teacher's prompt. {prompt} is the question; {solution} and {feedback} are "
        "the filled templates below, or nothing. For a prompt that is continued as text it must end with {prompt}.",
    )
    solution_template: str = Field(
        "\n\nThis is a correct answer:\n\n{solution}",
        description="What {solution} of prompt_template becomes if there is a correct answer.",
    )
    feedback_template: str = Field(
        "\n\nThis is feedback on an earlier answer:\n\n{feedback}",
        description="What {feedback} of prompt_template becomes if there is feedback.",
    )

    @field_validator(*_PLACES)
    @classmethod
    def _check_places(cls, template: str, info: Any) -> str:
        known = _PLACES[info.field_name]
        if missing := sorted(known - set(re.findall(r"\{(\w+)\}", template))):
            raise ValueError(f"lacks {', '.join(f'{{{name}}}' for name in missing)}")
        return template

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse workflows of several turns or with images, whose teacher would see another conversation."""
        del config
        chosen = self.workflow
        if not isinstance(chosen.settings, PromptSettings):
            yield f"'{chosen.target}' has no settings of a prompt, from which the teacher's prompt is written"
        if chosen.target == "core/multi_turn" or chosen.declared("shows_images"):
            what = "several turns" if chosen.target == "core/multi_turn" else "images"
            yield f"'{chosen.target}' has {what}, and self-distillation takes one turn of text: use core/single_turn"

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why the teacher's prompt cannot be written for a row; empty if it can."""
        del tokenizer
        if self.solution_key is not None and not isinstance(row.get(self.solution_key), str):
            return f"has no text '{self.solution_key}': correct workflow.solution_key"
        assert isinstance(self.workflow.settings, PromptSettings)
        try:
            prompt = prompt_of(row, self.workflow.settings)
        except RowError:
            return ""  # the workflow itself reports it
        if isinstance(prompt, str):
            if not self.prompt_template.endswith("{prompt}"):
                return (
                    "has a prompt that is continued as text, so workflow.prompt_template must end with {prompt}, such "
                    "as '{solution}{feedback}\\n{prompt}'"
                )
        elif prompt.messages[-1]["role"] != "user":
            return f"ends with a message of the role {prompt.messages[-1]['role']}; self-distillation needs the user's"
        return ""


class TeacherPromptsSettings(Settings):
    """Settings of `self_distillation.teacher_prompts`."""

    success_reward: float = Field(
        1.0,
        description="An answer is correct, so that the teacher of another one gets it, if its reward after shaping is "
        "at least this.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the workflow's episodes can write a teacher's prompt, and that there is something to show."""
        if config.workflow is None:
            return
        if config.workflow.record is not None and config.workflow.target != WORKFLOW:
            yield (
                f"the teacher's prompt is written by workflow: {WORKFLOW}, but the workflow is "
                f"{config.workflow.target}: set workflow={{type: {WORKFLOW}, workflow: ...}}"
            )
        settings = config.workflow.settings
        if not isinstance(settings, SelfDistillationSettings) or config.rollout.group_size > 1:
            return
        if settings.feedback is None and settings.solution_key is None:
            yield (
                "an answer that is alone in its group has no other one to learn from: set rollout.group_size to 2 or "
                "more, workflow.feedback or workflow.solution_key"
            )


class SelfTeacherSettings(BatchTransformSettings):
    """Settings of `self_teacher.self_teacher`."""

    belongs_in = "batch_transforms"

    ema_decay: float | None = Field(
        0.95,
        ge=0,
        lt=1,
        description="Decay d of the teacher's weights, an average over training steps: teacher = d x teacher + (1 - d) "
        "x policy. null: the teacher is the current policy, without a second model in memory.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the averaged model, if there is one, and the forward pass of the policy."""
        if self.ema_decay is not None:
            yield self_teacher_role(self.ema_decay)
        yield ForwardPass(ACTOR, "logprobs", "proximal_logprobs")


def self_teacher_role(decay: float) -> Role:
    """Return the role of a teacher whose weights are a moving average of the policy's."""
    return Role("self_teacher", ema=EMA(ACTOR.name, decay=decay))


class SelfDistillationAdvantageSettings(Settings):
    """Settings of `self_teacher.SelfDistillationAdvantage`."""

    reward_advantage: Selection | None = component(
        "advantages",
        description="Estimator of an advantage from rewards that is mixed in, such as grpo/group_normalized. null: the "
        "teacher alone.",
    )
    reward_weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Weight λ of reward_advantage, if there is one; the advantage from the teacher has 1 - λ.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward pass of the policy."""
        return (ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),)


class SelfDistillationLossSettings(PolicyLossSettings):
    """Settings of `distillation.distillation` with a column `teacher_logprobs` of a batch transform; it has none."""

    anchor = "none"


class SDPOSettings(PolicyGradientSettings):
    """Self-distillation policy optimization (SDPO, arXiv 2601.20802): the model with more information teaches itself.

    L = Σ_t KL(π(·|x, y_<t) ‖ sg[π_teacher(·|x, c, y_<t)]) on sampled answers y. The teacher is the model itself, or the
    moving average of it, and c is a correct answer of the same group, feedback on y, or both. Here the KL is estimated
    from the sampled token. The authors' code compares the likeliest 100 tokens, which has less variance.

    A_t = log π_teacher(y_t|x, c, y_<t) - log π_prox(y_t|x, y_<t);  L = -1/N Σ_t w_t A_t log π(y_t), w_t = min(π_prox /
    μ, 2), over the N tokens of an update. An answer without c has A_t = 0, and its tokens stay in N.

    Take it where feedback has more to say than a reward, and for models that can use a correct answer in their prompt.
    Small models often cannot. Mix with rewards by `advantage.reward_advantage`. It needs the workflow
    `finetuning/self_distillation`, and takes one turn of text.
    """

    default_learning_rate: ClassVar[float] = 1e-6

    group_filters: list[Selection] = component(
        "group_filters",
        default=["finetuning/teacher_prompts"],
        description="Filters that drop finished groups or take answers out of the loss, in this order.",
    )
    batch_transforms: list[Selection] = component(
        "batch_transforms",
        default=["finetuning/self_teacher"],
        description="Functions that compute fields of a whole batch before its advantages, in this order.",
    )
    advantage: Selection = component(
        "advantages",
        default="finetuning/self_distillation",
        description="Estimator that turns rewards into advantages.",
    )
    corrections: list[Selection] = component(
        "corrections",
        default=["grpo/token_truncate"],
        description="Off-policy corrections for the distance between the policy that sampled and the proximal "
        "policy. Their weights are multiplied.",
    )
    policy_loss: Selection = component(
        "policy_losses", default="finetuning/self_distillation", description="Loss of each token."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the teacher's prompts are written and read."""
        yield from super().check(config)
        for key, target in (
            ("group_filters", "finetuning/teacher_prompts"),
            ("batch_transforms", "finetuning/self_teacher"),
        ):
            if target not in [chosen.target for chosen in getattr(self, key)]:
                yield f"{key} lacks {target}, which this algorithm needs: add it to the list"
