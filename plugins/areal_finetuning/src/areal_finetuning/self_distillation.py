"""Self-distillation in rollout workers: the prompt that the model gets as its own teacher.

    worker    SelfDistillation.run_episode    one answer; feedback on it; an episode that can write a teacher's prompt
              teacher_prompts (group filter)  a correct answer of the group for each; the teacher's prompts as tokens
    trainer   self_teacher (batch transform)  forward pass on teacher's prompt and answer: `teacher_logprobs`

The tokens of a prompt are the field `teacher_prompt_ids` of a trajectory's level `teacher`, whose lengths are its own.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from areal_core.chat import PromptSettings, answer_text, prompt_of, read_prompt
from areal_core.data import Episode
from areal_core.sdk import read_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.data import Trajectory
    from areal_core.sdk import RolloutWorkflow, WorkflowContext
    from areal_finetuning.self_distillation_config import SelfDistillationSettings

LEVEL: Final = "teacher"
COLUMN: Final = "teacher_prompt_ids"
"""Level and field of a trajectory with the tokens of the teacher's prompt, int64; empty if it would know no more."""


def _no_prompt(solution: str) -> list[int]:
    """Return the prompt of a teacher that knows nothing."""
    del solution
    return []


@dataclass(slots=True)
class Attempt(Episode):
    """An episode of one answer whose teacher's prompt can be written.

    Attributes:
        answer: text of the answer, as another answer's teacher gets it: without thoughts and end token.
        write_prompt: turns the text of a correct answer, or an empty text, into the tokens of the teacher's prompt.
            The result is empty if that teacher would know no more than the student.
    """

    answer: str = ""
    write_prompt: Callable[[str], list[int]] = _no_prompt


class SelfDistillation:
    """Runs another workflow of one turn, and prepares what its teacher is shown; see `SelfDistillationSettings`."""

    def __init__(self, settings: SelfDistillationSettings) -> None:
        self._settings = settings
        self._inner: RolloutWorkflow = settings.workflow.build()
        self._make_environment = settings.feedback.prepare() if settings.feedback is not None else None

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Attempt:
        """Run one episode; see `RolloutWorkflow.run_episode`.

        Raises:
            ValueError: the inner workflow returned several trajectories, several turns or images.
        """
        episode = await self._inner.run_episode(row, context)
        trajectory = _only_turn(episode)
        trajectory.multimodal[LEVEL] = {COLUMN: np.zeros(0, np.int64)}
        attempt = Attempt(**{each.name: getattr(episode, each.name) for each in fields(Episode)})
        if context.is_evaluation:
            return attempt
        tokenizer, prompts = context.tokenizer, self._prompts
        opened = read_prompt(tokenizer, row, prompts).opened
        output_ids = trajectory.tokens["input_ids"][trajectory.tokens["turn_ids"] >= 0].tolist()
        completion = answer_text(tokenizer, output_ids, context.end_ids, opened)
        feedback = await self._feedback(row, completion)
        room = tokenizer.model_max_length - len(output_ids)

        def write_prompt(solution: str) -> list[int]:
            shown = solution or (row[self._settings.solution_key] if self._settings.solution_key else "")
            if not shown and not feedback:
                return []
            ids = self._teacher_prompt(tokenizer, row, shown, feedback)
            return ids if len(ids) <= room else []

        return replace(attempt, answer=completion.rpartition("</think>")[2].strip(), write_prompt=write_prompt)

    @property
    def _prompts(self) -> PromptSettings:
        settings = self._settings.workflow.settings
        assert isinstance(settings, PromptSettings)
        return settings

    async def _feedback(self, row: Mapping[str, Any], completion: str) -> str:
        """Return the observation of the feedback's environment after an answer; empty if there is none."""
        if self._make_environment is None:
            return ""
        environment = self._make_environment()
        async with AsyncExitStack() as stack:
            if hasattr(environment, "close"):
                stack.push_async_callback(environment.close)
            await environment.reset(row)
            observation = read_step(environment, await environment.step(completion)).observation
        if observation is None or isinstance(observation, str):
            return observation or ""
        return "\n".join(str(message["content"]) for message in observation)

    def _teacher_prompt(self, tokenizer: Any, row: Mapping[str, Any], solution: str, feedback: str) -> list[int]:
        """Return the tokens of the row's prompt with a correct answer and feedback in it."""
        settings, prompts = self._settings, self._prompts
        parts = {
            "solution": _filled(settings.solution_template, {"solution": solution}) if solution else "",
            "feedback": _filled(settings.feedback_template, {"feedback": feedback}) if feedback else "",
        }
        asked: Any = prompt_of(row, prompts)
        if isinstance(asked, str):
            prompt: Any = _filled(settings.prompt_template, {"prompt": asked, **parts})
        else:
            *earlier, last = asked.messages
            content = _filled(settings.prompt_template, {"prompt": last["content"], **parts})
            prompt = [*earlier, {**last, "content": content}]
        return read_prompt(tokenizer, {**row, prompts.prompt_key: prompt}, prompts).input_ids


def teacher_prompts(episodes: Sequence[Episode], *, success_reward: float) -> list[Episode]:
    """Write the prompt of each answer's teacher, with a correct answer of the same group (SDPO, arXiv 2601.20802).

    An answer with a reward of at least `success_reward` is correct. The teacher of answer i gets the first correct one
    after i in the group, and after the last one the search begins again with the first. It never gets answer i itself.
    No answer is dropped.

    Args:
        episodes: of the workflow `finetuning/self_distillation`.
        success_reward: lowest reward of a correct answer.

    Returns:
        The episodes, whose trajectories have the teacher's prompt as int64 `multimodal["teacher"]`.

    Raises:
        TypeError: the episodes are of another workflow.

    Example:
        >>> from areal_core.data import FinishReason, Generation, Trajectory
        >>> from areal_finetuning.self_distillation import Attempt, teacher_prompts
        >>> def attempt(reward, answer):
        ...     trajectory = Trajectory.from_generation([5], Generation([7], [-0.1], [0], FinishReason.STOP))
        ...     write = lambda solution: [ord(letter) for letter in f"{solution}?"] if solution else []
        ...     return Attempt([trajectory], reward, answer=answer, write_prompt=write)
        >>> group = [attempt(0.0, "3"), attempt(1.0, "4")]
        >>> found = teacher_prompts(group, success_reward=1.0)  # the correct answer has no other one to learn from
        >>> [episode.trajectories[0].multimodal["teacher"]["teacher_prompt_ids"].tolist() for episode in found]
        [[52, 63], []]
    """
    attempts = []
    for episode in episodes:
        if not isinstance(episode, Attempt):
            raise TypeError("an episode of another workflow has no teacher: set workflow: finetuning/self_distillation")
        attempts.append(episode)
    count = len(attempts)
    correct = [attempt.reward >= success_reward and attempt.answer != "" for attempt in attempts]
    taught: list[Episode] = []
    for place, attempt in enumerate(attempts):
        others = ((place + step) % count for step in range(1, count))
        solution = next((attempts[other].answer for other in others if correct[other]), "")
        (trajectory,) = attempt.trajectories
        level = {COLUMN: np.array(attempt.write_prompt(solution), np.int64)}
        trajectory = replace(trajectory, multimodal={**trajectory.multimodal, LEVEL: level})
        taught.append(replace(attempt, trajectories=[trajectory]))
    return taught


def _only_turn(episode: Episode) -> Trajectory:
    """Return the trajectory of an episode of one turn of text.

    Raises:
        ValueError: the episode has several trajectories, several turns or images.
    """
    trajectory, count = episode.trajectories[0], len(episode.trajectories)
    turns = int(trajectory.tokens["turn_ids"].max()) + 1
    if count != 1 or turns > 1 or trajectory.multimodal:
        what = "images" if trajectory.multimodal else f"{count} trajectories" if count != 1 else f"{turns} turns"
        raise ValueError(f"an episode has {what}, and self-distillation takes one turn of text: use core/single_turn")
    return trajectory


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return a template with these values in braces; other braces, and those within values, stay."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
