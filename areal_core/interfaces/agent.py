"""A program that talks to a language model, and knows nothing of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds the policy: an address that speaks as OpenAI and Anthropic do, for one episode.

    Attributes:
        base_url: of OpenAI's SDK and all that are like it; ends in `/v1`.
        api_key: bearer token; it stands for the episode and ends with it.
        model: name to ask for; any other is answered too.
    """

    base_url: str
    api_key: str
    model: str = "policy"

    def as_environment(self) -> dict[str, str]:
        """The variables under which programs look for a model."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }


class Agent(Protocol):
    """Plays one episode against an endpoint; a coroutine function, or a function, which is run in a thread.

    Parameters are passed by keyword and only those that it names: `row` (the data row), `endpoint`, `base_url`,
    `api_key`, `model`, or any key of the row, such as `question`.

    Returns:
        What the episode was worth: a number; or a mapping with `reward`, `rewards` (named components), `turn_rewards`
        (numbers by the id of the answer that earned them), `agent_rewards` (numbers by the model that was asked for,
        in place of `reward` for the conversations with it), or `answer` (a text that the run's rewards score); or such
        a text by itself. None leaves it to the run's rewards, which score the last answer of the policy.
    """

    def __call__(self, **arguments: Any) -> Awaitable[Mapping[str, Any] | float | str | None] | object:
        """Play it to its end. An exception is a failed episode."""


class Tool(Protocol):
    """A function that the policy may call, or a coroutine function; others run in a thread.

    Its name, the annotations of its parameters and its docstring (Google's form, with a line for each parameter) are
    what the policy reads of it. Arguments are checked against the annotations, and what it raises is told to the
    policy. Keys beside `type:` bind parameters, which the policy then does not see.
    """

    def __call__(self, **arguments: Any) -> Any:
        """The result: a text, or what JSON can write."""
