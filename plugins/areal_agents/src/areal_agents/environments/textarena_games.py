"""Environment that plays a single-player game of TextArena."""

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
    """An `Environment` around a game of TextArena. The reward comes with the end of the game.

    The games draw from the global generator of `random`, which all episodes of a process share. So each game has a
    generator state of its own, which is active while the game computes. Games compute one at a time, on the event loop.

    Args:
        settings: the game and its arguments.
    """

    def __init__(self, settings: TextArenaSettings) -> None:
        self._settings = settings
        self._game: Any = None
        self._state: Any = None
        self._steps = 0

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """Start the game with the row's seed; see `Environment.reset`."""
        seed = seed_of(row, self._settings.seed_key)

        def begin() -> str:
            random.seed(seed)
            self._game = self._settings.open_game(seed)
            return self._new_text()

        return [{"role": "user", "content": self._with_own_random_state(begin)}]

    async def step(self, completion: str) -> StepResult:
        """Play the completion as an action; see `Environment.step`."""
        self._steps += 1

        def play() -> StepResult:
            has_ended, _ = self._game.step(action=completion)
            if not has_ended:
                is_last = self._settings.max_steps is not None and self._steps >= self._settings.max_steps
                return StepResult(None if is_last else self._new_text(), truncated=is_last)
            rewards, _ = self._game.close()
            reward = float((rewards or {}).get(0, 0.0))
            if not math.isfinite(reward):
                raise ValueError(f"the game {self._settings.id} gave the reward {reward}")
            return StepResult(reward=reward, terminated=True)

        return cast("StepResult", self._with_own_random_state(play))

    def _new_text(self) -> str:
        """Return the game's messages since the last call, without the player's, which the conversation already has.

        Read them from the innermost environment: the library's wrappers repeat the whole game at each turn.
        """
        innermost = self._game
        while "env" in vars(innermost):
            innermost = innermost.env
        _, messages = innermost.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind.name != "PLAYER_ACTION") or "(nothing)"

    def _with_own_random_state(self, call: Callable[[], Any]) -> Any:
        global_state = random.getstate()
        if self._state is not None:
            random.setstate(self._state)
        try:
            return call()
        finally:
            self._state = random.getstate()
            random.setstate(global_state)
