"""Read the result of an episode from the messages of a verifiers server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_agents.foreign_process import EnvironmentServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN_CHARACTERS = 1000
"""Last characters of an error of the environment that are part of a message."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of one agent in an episode.

    Attributes:
        agent: name of the agent in the environment, such as `solver`.
        is_trained: whether the environment lets the policy learn from this trace.
        has_answers: whether the agent has asked the model.
        rewards: weighted rewards by name. Empty if the taskset has none.
        metrics: metrics by name.
    """

    agent: str = "agent"
    is_trained: bool = True
    has_answers: bool = True
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Traces:
    """The traces of one episode, as far as the server has sent them. Their messages and tokens are left out."""

    def __init__(self) -> None:
        self._fields: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, list[Any]] = {}
        self._answered: set[str] = set()

    def apply(self, delta: Mapping[str, Any]) -> None:
        """Add one `delta` message: new errors of a trace, and fields that have changed."""
        identifier = delta["trace"]
        if delta.get("discard"):  # the environment repeats this agent's part
            self._fields.pop(identifier, None)
            self._errors.pop(identifier, None)
            return
        self._fields.setdefault(identifier, {}).update(delta.get("set") or {})
        self._errors.setdefault(identifier, []).extend(delta.get("errors") or [])
        if delta.get("calls"):
            self._answered.add(identifier)

    def finish(self, reply: Mapping[str, Any]) -> dict[str, Trace]:
        """Return the traces of an episode by identifier, from the reply that ends it.

        verifiers reports a failed episode as one with the reward 0 and with errors beside it.

        Raises:
            EnvironmentServerError: the episode failed.
            KeyError, TypeError, ValueError: the reply is not one of verifiers.
        """
        episode = reply["head"]
        identifiers = [summary["id"] for summary in reply["traces"]]
        errors = [*episode["errors"], *(error for each in identifiers for error in self._errors[each])]
        if not episode["ok"]:
            reasons = "; ".join(f"{error['type']}: {error['message'].strip()[-SHOWN_CHARACTERS:]}" for error in errors)
            raise EnvironmentServerError(reasons or "the environment reports an episode that is not ok, without errors")
        return {each: _read_trace(self._fields[each], has_answers=each in self._answered) for each in identifiers}


def _read_trace(fields: Mapping[str, Any], *, has_answers: bool) -> Trace:
    rewards = fields.get("rewards") or {}
    if missing := [name for name, reward in rewards.items() if reward is None]:
        raise EnvironmentServerError(f"the environment did not compute the reward {', '.join(missing)}")
    values = {name: float(reward["score"]) * float(reward["weight"]) for name, reward in rewards.items()}
    if wrong := {name: value for name, value in values.items() if not math.isfinite(value)}:
        raise EnvironmentServerError(f"the environment computed rewards that are not finite: {wrong}")
    metrics = {
        name: float(value)
        for name, value in (fields.get("metrics") or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    agent = fields["agent"]
    return Trace(agent["name"], bool(agent["trainable"]), has_answers, values, metrics)
