"""Environment on an OpenEnv server. Each episode has one session, over a WebSocket."""

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
        settings: the server, and the format of actions and observations.

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
        """Start the session's environment; see `Environment.reset`.

        Raises:
            ValueError: the row lacks a key of `reset_keys` or `opening_key`.
            ConnectionError: the server does not answer in time, or reports an error.
        """
        settings = self._settings
        if absent := [key for key in (*settings.reset_keys, settings.opening_key) if key and key not in row]:
            raise ValueError(f"the row has no {', '.join(absent)}, only {', '.join(row)}: see reset_keys, opening_key")
        result = await self._request("reset", **{key: row[key] for key in settings.reset_keys})
        message = str(row[settings.opening_key]) if settings.opening_key else self._observation_text(result.observation)
        return [{"role": "user", "content": message}]

    async def step(self, completion: str) -> StepResult:
        """Send the completion as an action; see `Environment.step`. A missing reward counts as 0."""
        result = await self._request("step", {**self._settings.action, self._settings.action_key: completion})
        reward = float(result.reward or 0.0)
        if not math.isfinite(reward):
            raise ValueError(f"the OpenEnv server {self._settings.url} gave the reward {reward}")
        if result.done:
            return StepResult(reward=reward, terminated=True)
        return StepResult(self._observation_text(result.observation), reward)

    async def close(self) -> None:
        """Close the session."""
        async with asyncio.timeout(self._settings.step_timeout_s):
            await self._client.disconnect()

    async def _request(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        limit = self._settings.step_timeout_s
        try:
            return await getattr(self._client, name)(*arguments, **keywords)
        except TimeoutError:
            problem = f"did not answer within workflow.environment.step_timeout_s: {limit:g}"
        except Exception as error:  # noqa: BLE001 - errors of the client, the socket and the server are reported alike
            problem = f"failed: {type(error).__name__}: {error}"
        raise ConnectionError(f"{name} of the OpenEnv server {self._settings.url} {problem}")

    def _observation_text(self, observation: Any) -> str:
        key = self._settings.observation_key
        if key is None:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if key not in observation:
            raise ValueError(f"an observation has no '{key}', only {', '.join(observation)}: set observation_key")
        return str(observation[key])
