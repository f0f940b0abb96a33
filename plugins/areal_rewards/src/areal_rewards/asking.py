"""Requests to a model behind an address, which are tried again where the server is busy, broken or gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from areal_rewards.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from areal_core.config import Secret

PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a request is tried again; doubled each time."""

Answer = TypeVar("Answer")


class Asker:
    """Posts JSON to one address over one session, which is opened by the first request.

    Args:
        who: what is asked, for errors.
        reward: whose reward this is, for the error where aiohttp is not installed.
        url: where it is asked.
        settings: how often a request is tried again and how long it may take.
        key: sent as the bearer.

    Attributes:
        counts: requests and retries so far; its user may add to it and clear it.

    Raises:
        ConfigError: aiohttp is not installed.
    """

    def __init__(self, who: str, reward: str, url: str, settings: Any, key: Secret | None = None) -> None:
        self._aiohttp = load_library(f"the reward {reward}", "aiohttp", "judge")
        self._who, self._url, self._settings, self._key = who, url, settings, key
        self._session: Any = None
        self.counts: Counter[str] = Counter()

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """What `read` makes of the server's response; where it raises, the request is tried again.

        Raises:
            RuntimeError: the server could not be asked, in all tries.
        """
        why = ""
        for attempt in range(self._settings.max_retries + 1):
            if attempt:
                self.counts["retries"] += 1
                await asyncio.sleep(min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
            self.counts["requests"] += 1
            try:
                async with self._connected().post(self._url, json=body) as response:
                    text = await response.text()
                    if response.status == 200:
                        return await read(response)
                    why = f"{response.status} {response.reason}: {text[:200]}"
                    if response.status < 500 and response.status != HTTPStatus.TOO_MANY_REQUESTS:
                        break  # asked again it would answer the same
            except (self._aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the {self._who} at {self._url} did not answer: {why}")

    async def close(self) -> None:
        """Close the session, if a request opened one."""
        if self._session is not None:
            await self._session.close()

    def _connected(self) -> Any:
        if self._session is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key.get()}"}
            limit = self._aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
            self._session = self._aiohttp.ClientSession(headers=headers, timeout=limit)
        return self._session
