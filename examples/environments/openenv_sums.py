"""An environment of OpenEnv: sums of two numbers. `uvicorn openenv_sums:app` serves it; areal does not import it."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SIZES = {"train": 3800, "test": 200}


class Answer(Action):
    """What the policy says."""

    message: str


class Question(Observation):
    """A sum."""

    text: str = ""


class Sums(Environment):
    """One sum an episode. The tasks of the two splits are always the same ones."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._result = 0

    def num_tasks(self, split: str) -> int:
        """Return the number of sums."""
        return SIZES[split]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the sums as text."""
        return [{"question": self._question(split, index)[0]} for index in range(SIZES[split])[start:stop]]

    def reset(self, split: str = "train", index: int = 0, **_: Any) -> Question:
        """Ask the sum of a task."""
        text, self._result = self._question(split, index)
        return Question(text=text)

    def step(self, action: Answer, **_: Any) -> Question:
        """Reward the result behind the working, which is in braces."""
        return Question(done=True, reward=float(action.message.rpartition("}")[2].strip() == str(self._result)))

    @property
    def state(self) -> State:
        """Nothing that a client needs."""
        return State()

    @staticmethod
    def _question(split: str, index: int) -> tuple[str, int]:
        generator = random.Random(f"{split} {index}")
        first, second = generator.randrange(10, 100), generator.randrange(10, 100)
        return f"{first}+{second}=", first + second


app = create_fastapi_app(Sums, Answer, Question, max_concurrent_envs=64)
