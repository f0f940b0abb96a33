"""Agents: programs that use a language model through an API and do not depend on areal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of the policy for one episode. It implements the APIs of OpenAI and Anthropic.

    Attributes:
        base_url: base URL for OpenAI's SDK and compatible ones; ends in `/v1`.
        api_key: bearer token of the episode, valid until the episode ends.
        model: name of the model. The endpoint accepts any other name, too.

    Example:
        >>> from areal_core.sdk import Endpoint
        >>> endpoint = Endpoint("http://127.0.0.1:4711/v1", api_key="secret")
        >>> endpoint.as_environment()["ANTHROPIC_BASE_URL"]
        'http://127.0.0.1:4711'
    """

    base_url: str
    api_key: str
    model: str = "policy"

    def as_environment(self) -> dict[str, str]:
        """Return the environment variables in which OpenAI's and Anthropic's SDKs look for an endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


class Agent(Protocol):
    """A function that runs one episode with the policy behind an endpoint. Functions that are not coroutines run in a
    thread.

    The function gets only the parameters that it names, by keyword: `row` (the data row), `endpoint`, `base_url`,
    `api_key`, `model`, or a key of the row, such as `question`.

    Returns:
        - a number: the reward of the episode.
        - a text: an answer that the run's rewards score.
        - a mapping with `reward`; `rewards` (components by name); `turn_rewards` (rewards by the id of the response);
          `agent_rewards` (rewards by model name, which replace `reward` for the conversations with this model); or
          `answer` (a text that the run's rewards score).
        - None: the run's rewards score the last answer of the policy.
    """

    def __call__(self, **arguments: Any) -> Awaitable[Mapping[str, Any] | float | str | None] | object:
        """Run the episode. An exception fails it."""


class Tool(Protocol):
    """A function that the policy may call. Functions that are not coroutines run in a thread.

    The policy sees its name, the annotations of its parameters and its docstring (Google style, with a line for each
    parameter). Arguments are checked against the annotations. If the function raises, the policy gets the message. Keys
    beside `type:` in the config bind parameters, which the policy does not see.

    Example:
        >>> from areal_core.sdk import Tool
        >>> def multiply(a: int, b: int) -> int:
        ...     \"\"\"Multiply two numbers.
        ...
        ...     Args:
        ...         a: the first factor.
        ...         b: the second factor.
        ...     \"\"\"
        ...     return a * b
        >>> tool: Tool = multiply
        >>> tool(a=6, b=7)
        42
    """

    def __call__(self, **arguments: Any) -> Any:
        """Return a text, or a value that JSON can encode."""
