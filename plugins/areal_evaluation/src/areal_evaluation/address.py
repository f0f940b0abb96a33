"""Address of a model behind an OpenAI-compatible endpoint, and a check that the endpoint answers."""

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
"""Default environment variable of the API key. If it is not set, requests carry no key; local servers need none."""
PROBE_TIMEOUT_S = 30.0
"""Seconds that the endpoint may take to answer the check before the first episode."""
MAX_SHOWN = 300
"""Characters of an endpoint's response that a message quotes."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the model to evaluate.

    Attributes:
        url: base URL, as OpenAI's SDK takes it in `base_url`, without a trailing slash.
        model: name of the model there. It replaces the name that an agent requests.
        key_variable: environment variable that holds the API key; empty: no key.
        temperature: sampling temperature of every request; None: the agent's.
        request_timeout_s: timeout of one answer in seconds.

    Raises:
        UsageError: the URL or the timeout is invalid.
    """

    url: str
    model: str
    key_variable: str = ""
    temperature: float | None = None
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            hint = "write the URL that OpenAI's SDK takes as base_url, such as http://127.0.0.1:8000/v1"
            raise UsageError(f"--endpoint {self.url!r:.80} is not a URL", hints=(hint,))
        if not 0 < self.request_timeout_s < float("inf"):
            raise UsageError(f"--request-timeout is {self.request_timeout_s:g}; it must be a number of seconds above 0")

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers with the key, for OpenAI's and Anthropic's protocols; empty without a key.

        Raises:
            ConfigError: the environment variable is not set in this process.
        """
        if not self.key_variable:
            return {}
        if not (key := os.environ.get(self.key_variable)):
            message = f"the environment variable {self.key_variable}, which holds the key of {self.url}, is not set"
            raise ConfigError(message, hints=(f"set it first: export {self.key_variable}=...",))
        return {"Authorization": f"Bearer {key}", "x-api-key": key}


async def check_endpoint(address: Address, client: aiohttp.ClientSession) -> None:
    """Check that the endpoint answers a request for its models. Any answer is accepted, except a refused key.

    Raises:
        RunError: the endpoint does not answer, or refuses the key.
    """
    hint = "check that the server runs and that --endpoint is the URL that OpenAI's SDK takes as base_url"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async with client.get(f"{address.url}/models", allow_redirects=False) as answer:
                if answer.status not in (401, 403):
                    return
                key = f"the key in {address.key_variable}" if address.key_variable else "a request without a key"
                message = f"refuses {key} ({answer.status}): {shorten(await answer.text(errors='replace'))}"
                hint = "name the variable that holds its key: --api-key-variable NAME"
    except TimeoutError:
        message = f"did not answer within {PROBE_TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        message = f"cannot be reached: {error}"
    raise RunError(f"{address.url} {message}", hints=(hint,))


def shorten(text: Any) -> str:
    """Return the beginning of a text in one line, for a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} ..."
