"""The sums as an environment of OpenEnv. `uvicorn openenv_sums:app` serves it; areal does not import it."""

from __future__ import annotations

from typing import Any

import sums
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SPLITS = {"train": range(3800), "test": range(3800, 4000)}


class Answer(Action):
    """What the policy says."""

    message: str


class Question(Observation):
    """A sum."""

    text: str = ""


class Sums(Environment):
    """One sum an episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._answer = ""

    def num_tasks(self, split: str) -> int:
        """Return the number of sums."""
        return len(SPLITS[split])

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the questions."""
        return [{"question": sums.task(number)[0]} for number in SPLITS[split][start:stop]]

    def reset(self, split: str = "train", index: int = 0, **_: Any) -> Question:
        """Ask the sum of a task."""
        text, self._answer = sums.task(SPLITS[split][index])
        return Question(text=text)

    def step(self, action: Answer, **_: Any) -> Question:
        """Reward the answer."""
        return Question(done=True, reward=sums.score(action.message, self._answer))

    @property
    def state(self) -> State:
        """Nothing that a client needs."""
        return State()


app = create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=64)
