"""HTTP client that posts JSON and retries a request if the server is busy, fails or cannot be reached."""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from areal_rewards.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from areal_core.config import Secret

PAUSE_S = 0.5
"""Seconds before the first retry. The pause doubles with each further retry."""
MAX_PAUSE_S = 30.0
"""Upper bound of the pause in seconds."""

Answer = TypeVar("Answer")


class JSONClient:
    """Posts JSON to one URL. The first request opens a session, which the others reuse.

    Args:
        title: name of the server in errors.
        reward: name of the reward, for the error if aiohttp is not installed.
        url: URL of the requests.
        settings: settings of the reward, with `max_retries` and `request_timeout_s`.
        key: API key, sent as a bearer token.

    Attributes:
        counts: number of requests and retries. The owner may add counts and clear them.

    Raises:
        ConfigError: aiohttp is not installed.
    """

    def __init__(self, title: str, reward: str, url: str, settings: Any, key: Secret | None = None) -> None:
        self._aiohttp = load_library(f"the reward {reward}", "aiohttp", "judge")
        self._title = title
        self._url = url
        self._settings = settings
        self._key = key
        self._session: Any = None
        self.counts: Counter[str] = Counter()

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """Post a request and return what `read` makes of the response.

        A request is retried if the connection or the server fails, or if `read` raises a ValueError, LookupError or
        TypeError.

        Raises:
            RuntimeError: all tries failed, or the server refused the request.
        """
        failure = ""
        for attempt in range(self._settings.max_retries + 1):
            if attempt:
                self.counts["retries"] += 1
                await asyncio.sleep(min(PAUSE_S * 2 ** (attempt - 1), MAX_PAUSE_S))
            self.counts["requests"] += 1
            try:
                async with self._open_session().post(self._url, json=body) as response:
                    text = await response.text()
                    if response.status == 200:
                        return await read(response)
                    failure = f"{response.status} {response.reason}: {text[:200]}"
                    if response.status < 500 and response.status != HTTPStatus.TOO_MANY_REQUESTS:
                        break  # a client error: a retry would get the same answer
            except (self._aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the {self._title} at {self._url} did not answer: {failure}")

    async def close(self) -> None:
        """Close the session, if a request opened one."""
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> Any:
        if self._session is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key.get()}"}
            limit = self._aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
            self._session = self._aiohttp.ClientSession(headers=headers, timeout=limit)
        return self._session
