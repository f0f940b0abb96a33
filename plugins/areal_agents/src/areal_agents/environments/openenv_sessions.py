"""An environment behind a server of OpenEnv: one session, over a WebSocket, for each episode."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

from areal_agents.environments.libraries import load_library
from areal_core.sdk import StepResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_agents.environments.config import OpenEnvSettings


class OpenEnvEnvironment:
    """An `Environment` around a session of an OpenEnv server.

    Args:
        settings: which server, and how actions and observations are written.

    Raises:
        ConfigError: openenv is not installed.
    """

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        library = load_library("the environment openenv", "openenv.core.generic_client", "openenv")
        self._client = library.GenericEnvClient(
            settings.url,
            connect_timeout_s=settings.connect_timeout_s,
            message_timeout_s=settings.step_timeout_s,
            mode="simulation",
        )

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
        """See `Environment.reset`."""
        settings = self._settings
        if absent := [key for key in (*settings.reset_keys, settings.opening_key) if key and key not in row]:
            raise ValueError(f"the row has no {', '.join(absent)}, only {', '.join(row)}: see reset_keys, opening_key")
        result = await self._ask("reset", **{key: row[key] for key in settings.reset_keys})
        message = str(row[settings.opening_key]) if settings.opening_key else self._told(result.observation)
        return [{"role": "user", "content": message}]

    async def step(self, completion: str) -> StepResult:
        """See `Environment.step`; a turn without a reward of the server's has 0."""
        result = await self._ask("step", {**self._settings.action, self._settings.action_key: completion})
        reward = float(result.reward or 0.0)
        if not math.isfinite(reward):
            raise ValueError(f"the OpenEnv server {self._settings.url} gave the reward {reward}")
        if result.done:
            return StepResult(reward=reward, terminated=True)
        return StepResult(self._told(result.observation), reward)

    async def close(self) -> None:
        """Give the session back."""
        async with asyncio.timeout(self._settings.step_timeout_s):
            await self._client.disconnect()

    async def _ask(self, name: str, *given: Any, **named: Any) -> Any:
        limit = self._settings.step_timeout_s
        try:
            return await getattr(self._client, name)(*given, **named)
        except TimeoutError:
            words = f"did not answer within workflow.environment.step_timeout_s: {limit:g}"
        except Exception as error:  # noqa: BLE001 - of the client, the socket or the server: all of it is told alike
            words = f"failed: {type(error).__name__}: {error}"
        raise ConnectionError(f"{name} of the OpenEnv server {self._settings.url} {words}")

    def _told(self, observation: Any) -> str:
        key = self._settings.observation_key
        if key is None:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if key not in observation:
            raise ValueError(f"an observation has no '{key}', only {', '.join(observation)}: set observation_key")
        return str(observation[key])
