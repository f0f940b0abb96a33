"""A game of TextArena for one player."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, cast

from areal_agents.environments.seeds import seed_of
from areal_core.sdk import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_agents.environments.config import TextArenaSettings


class TextArenaEnvironment:
    """An `Environment` around a game of TextArena; its reward comes with its end.

    The games draw from the generator of the module `random`, which all episodes of a process share. So each game has a
    state of it by itself, which is put in place while the game computes; no two games compute at once.

    Args:
        settings: which game.
    """

    def __init__(self, settings: TextArenaSettings) -> None:
        self._settings = settings
        self._game: Any = None
        self._state: Any = None
        self._steps = 0

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """See `Environment.reset`; the row's seed is the game's."""
        seed = seed_of(row, self._settings.seed_key)

        def begin() -> str:
            random.seed(seed)
            self._game = self._settings.open_game(seed)
            return self._heard()

        return [{"role": "user", "content": self._by_itself(begin)}]

    async def step(self, completion: str) -> StepResult:
        """See `Environment.step`."""
        self._steps += 1

        def play() -> StepResult:
            has_ended, _ = self._game.step(action=completion)
            if not has_ended:
                is_last = self._settings.max_steps is not None and self._steps >= self._settings.max_steps
                return StepResult(None if is_last else self._heard(), truncated=is_last)
            rewards, _ = self._game.close()
            reward = float((rewards or {}).get(0, 0.0))
            if not math.isfinite(reward):
                raise ValueError(f"the game {self._settings.id} gave the reward {reward}")
            return StepResult(reward=reward, terminated=True)

        return cast("StepResult", self._by_itself(play))

    def _heard(self) -> str:
        """What the game has said since the last time; what the player said, the conversation has already.

        Past the library's wrappers, which repeat the whole game at each turn.
        """
        innermost = self._game
        while "env" in vars(innermost):
            innermost = innermost.env
        _, messages = innermost.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind.name != "PLAYER_ACTION") or "(nothing)"

    def _by_itself(self, work: Callable[[], Any]) -> Any:
        others = random.getstate()
        if self._state is not None:
            random.setstate(self._state)
        try:
            return work()
        finally:
            self._state = random.getstate()
            random.setstate(others)
