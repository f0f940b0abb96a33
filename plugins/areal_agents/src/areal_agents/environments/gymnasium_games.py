"""Environment that plays a game of gymnasium as text."""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, Any, cast

from areal_agents.environments.libraries import load_gymnasium
from areal_agents.environments.seeds import seed_of
from areal_agents.environments.spaces import UnreadableError, describe
from areal_agents.threads import run_in_thread
from areal_core.sdk import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_agents.environments.config import GymnasiumSettings


class GymnasiumEnvironment:
    """An `Environment` around a game of gymnasium.

    If a completion names no action, the policy gets a message and `invalid_reward`, and the game does not move.

    Args:
        settings: the game, and how its observations and actions become text.

    Raises:
        ConfigError: gymnasium is not installed.
    """

    def __init__(self, settings: GymnasiumSettings) -> None:
        self._settings = settings
        load_gymnasium()  # import once, before the first episodes would import it from several threads
        self._describe = settings.describe.build() if settings.describe is not None else None
        self._game: Any = None
        self._reader: Any = None
        self._steps = 0

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """Start the game with the row's seed; see `Environment.reset`."""
        settings, seed = self._settings, seed_of(row, self._settings.seed_key)

        def begin() -> str:
            self._game, self._reader = settings.open_game()
            observation, _ = self._game.reset(seed=seed)
            return self._describe_observation(observation)

        observation = await self._in_time(begin)
        opening = settings.opening.format(observation=observation, actions=self._reader.choices)
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        return [*system, {"role": "user", "content": opening}]

    async def step(self, completion: str) -> StepResult:
        """Play the action that the completion names; see `Environment.step`."""
        settings = self._settings
        self._steps += 1
        is_last = settings.max_steps is not None and self._steps >= settings.max_steps
        try:
            action = self._reader.read(completion)
        except UnreadableError as error:
            return StepResult(None if is_last else str(error), settings.invalid_reward, truncated=is_last)

        def play() -> StepResult:
            observation, reward, terminated, truncated, _ = self._game.step(action)
            if not math.isfinite(reward):
                raise ValueError(f"the game {settings.id} gave the reward {reward}")
            if terminated or truncated or is_last:
                return StepResult(None, float(reward), bool(terminated), not terminated)
            text = settings.turn.format(
                observation=self._describe_observation(observation), actions=self._reader.choices
            )
            return StepResult(text, float(reward))

        return cast("StepResult", await self._in_time(play))

    async def close(self) -> None:
        """Close the game and release its resources."""
        if self._game is not None:
            game, self._game = self._game, None
            await self._in_time(game.close)

    def _describe_observation(self, observation: Any) -> str:
        if self._describe is not None:
            return str(self._describe(observation))
        if self._settings.observation == "rendering":
            return plain(str(self._game.render())).strip()
        return describe(self._game.observation_space, observation)

    async def _in_time(self, call: Callable[[], Any]) -> Any:
        """Run a call of the game in a thread, within `step_timeout_s`, so that a slow game blocks no other episode."""
        limit = self._settings.step_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await run_in_thread(call)
        except asyncio.CancelledError:
            self._game = None  # the abandoned thread still uses it
            raise
        except TimeoutError:
            self._game = None
            message = f"the game {self._settings.id} took longer than workflow.environment.step_timeout_s: {limit:g}"
            raise TimeoutError(message) from None


def plain(rendering: str) -> str:
    """Return a rendering without terminal escape codes. Colored text, such as the player's cell, is put in brackets."""
    marked = re.sub(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0?m", r"[\1]", rendering, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked)
