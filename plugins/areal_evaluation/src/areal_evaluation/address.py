"""Somebody else's model behind an address that speaks as OpenAI does, and whether it answers at all."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from areal_core.errors import ConfigError, RunError, UsageError

if TYPE_CHECKING:
    from typing import Any

DEFAULT_VARIABLE = "OPENAI_API_KEY"
"""Of the key, where none is named; without it requests carry no key, as servers of one's own need none."""
FIRST_ANSWER_S = 30.0
"""For the address to say that it is there, before the first episode begins."""
SHOWN = 300
"""Characters of what an address answered, in a message."""


@dataclass(frozen=True, slots=True)
class Address:
    """A model of somebody else's.

    Attributes:
        url: what OpenAI's SDK calls `base_url`; without a slash at its end.
        model: its name there; it takes the place of whatever name an agent asks for.
        key_variable: environment variable that holds the key; empty where there is none.
        temperature: put into every request; None leaves it to whoever asks.
        request_timeout_s: for one answer.
    """

    url: str
    model: str
    key_variable: str = ""
    temperature: float | None = None
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            hint = "write what OpenAI's SDK calls base_url, such as http://127.0.0.1:8000/v1"
            raise UsageError(f"--endpoint {self.url!r:.80} is not an address", hints=(hint,))
        if not 0 < self.request_timeout_s < float("inf"):
            raise UsageError(f"--request-timeout is {self.request_timeout_s:g}; it must be a number of seconds above 0")

    @property
    def headers(self) -> dict[str, str]:
        """Those that carry the key, for OpenAI's protocols and Anthropic's.

        Raises:
            ConfigError: its variable is not set in this process.
        """
        if not self.key_variable:
            return {}
        if not (key := os.environ.get(self.key_variable)):
            message = (
                f"the environment variable {self.key_variable}, which is to hold the key of {self.url}, is not set"
            )
            raise ConfigError(message, hints=(f"set it first: export {self.key_variable}=...",))
        return {"Authorization": f"Bearer {key}", "x-api-key": key}


async def look_for(address: Address, client: aiohttp.ClientSession) -> None:
    """Ask an address which models it has. Whatever it answers, it is there; only a refused key is of interest.

    Raises:
        RunError: nobody answers, or the key is refused.
    """
    hint = "see that the server runs, and that --endpoint is what its SDK calls base_url"
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            async with client.get(f"{address.url}/models", allow_redirects=False) as answer:
                if answer.status not in (401, 403):
                    return
                key = f"the key in {address.key_variable}" if address.key_variable else "a request without a key"
                message = f"refuses {key} ({answer.status}): {shown(await answer.text(errors='replace'))}"
                hint = "name the variable that holds its key: --api-key-variable NAME"
    except TimeoutError:
        message = f"does not answer: not a word within {FIRST_ANSWER_S:g} s"
    except aiohttp.ClientError as error:
        message = f"cannot be reached: {error}"
    raise RunError(f"{address.url} {message}", hints=(hint,))


def shown(text: Any) -> str:
    """The beginning of what somebody said, in one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
