"""Problems without end: the library reasoning-gym, as a data set and as the reward that goes with it."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_core.plugins import register
from areal_rewards.config import ReasoningGymSettings, TaskScoreSettings
from areal_rewards.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROBLEMS_OF_A_SEED = 10_000_000
"""The library makes problem i from seed + i, so that neighboring seeds share nearly all problems. Ours lie apart."""


@register("datasets", "reasoning_gym", summary="problems that the library reasoning-gym makes up")
class ReasoningGymDataset:
    """A `Dataset` of one task's problems.

    A row has `prompt`, `answer` and `metadata` as the task gives them, and `task`, from which the reward makes the
    very same problem again: {name, size, seed, settings, index}.

    Raises:
        ConfigError: the library is missing, has no such task, or the task does not accept its settings.
    """

    Config = ReasoningGymSettings

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self._task = {
            "name": settings.task,
            "size": settings.size,
            "seed": settings.seed,
            "settings": settings.settings,
        }
        self._problems = _problems(json.dumps(self._task))

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        problem = self._problems[index]
        return {
            "prompt": problem["question"],
            "answer": problem["answer"],
            "metadata": problem["metadata"],
            "task": {**self._task, "index": index},
        }


@register(
    "reward_functions",
    "reasoning_gym",
    summary="scores a row of the data set reasoning_gym by its task's own scorer",
    config=TaskScoreSettings,
)
def score_task(completion: str, task: Mapping[str, Any], *, answer_tag: str | None) -> float:
    """What the task's own scorer gives; between 0 and 1, with partial credit in some tasks.

    Args:
        completion: what the policy wrote.
        task: of a row of `ReasoningGymDataset`. The problem is made anew from it, because what some scorers compare
            with does not survive the way from process to process.
        answer_tag: score what stands in the last <tag>...</tag>; a completion without the tag gets 0.

    Raises:
        ConfigError: the library is missing.
    """
    answer: str = completion.strip()
    if answer_tag is not None:
        tagged = re.findall(f"<{answer_tag}>(.*?)</{answer_tag}>", completion, re.DOTALL)
        if not tagged:
            return 0.0
        answer = tagged[-1].strip()
    problems = _problems(json.dumps({key: value for key, value in task.items() if key != "index"}))
    return float(problems.score_answer(answer, problems[task["index"]]))


@functools.lru_cache(maxsize=16)
def _problems(task: str) -> Any:
    """The library's data set for a task, written as JSON. Its problems are made one by one when they are asked for."""
    library = load_library("reasoning_gym", "reasoning_gym", "reasoning-gym")
    wanted = json.loads(task)
    known = set(library.factory.DATASETS)
    if wanted["name"] not in known:
        raise ConfigError(
            f"reasoning-gym has no task '{wanted['name']}'; it has: {', '.join(sorted(known))}",
        )
    try:
        seed = wanted["seed"] * _PROBLEMS_OF_A_SEED
        return library.create_dataset(wanted["name"], size=wanted["size"], seed=seed, **wanted["settings"])
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"the task '{wanted['name']}' of reasoning-gym refuses its settings: {error}") from error
