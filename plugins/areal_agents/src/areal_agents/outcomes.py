"""Parse what an agent returns into rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS = ("reward", "rewards", "turn_rewards", "agent_rewards", "answer")
_PREFIX = re.compile("^(chatcmpl-|resp_|msg_)")
"""Prefixes that the protocols add to the identifiers of answers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rewards or answer that an agent returned for one episode.

    Attributes:
        reward: reward of the episode; None if the run's rewards decide.
        rewards: named components, for metrics.
        turn_rewards: rewards of single answers, by identifier. Without other rewards, their sum is the episode's.
        agent_rewards: rewards by agent. Each replaces `reward` for the conversations of that agent. An agent is a
            model name, or a session identifier where the environment sends these.
        answer: text that the run's rewards score; None: the policy's last answer.
        agent_names: names of agents by session identifier. Agents that are missing here are not trained on. Empty if
            agents are model names.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    agent_names: Mapping[str, str] = field(default_factory=dict)


def read_outcome(result: Any) -> Outcome:
    """Parse the result of an agent.

    Args:
        result: value as `areal_core.sdk.Agent` describes it: a number, a text, a mapping or None.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a mapping has unknown keys, or a number is not finite.
    """
    if result is None:
        return Outcome()
    if isinstance(result, str):
        return Outcome(answer=result)
    if isinstance(result, Mapping):
        if unknown := sorted(set(map(str, result)) - set(KEYS)):
            raise ValueError(f"the agent returned {', '.join(unknown)}, which is none of {', '.join(KEYS)}")
        turn_rewards = {_PREFIX.sub("", name): value for name, value in _numbers(result, "turn_rewards").items()}
        answer, reward = result.get("answer"), result.get("reward")
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"the agent's answer is {answer!r:.60}; it must be a text")
        if reward is None and answer is None and turn_rewards:
            reward = sum(turn_rewards.values())
        number = None if reward is None else _number("reward", reward)
        return Outcome(number, _numbers(result, "rewards"), turn_rewards, _numbers(result, "agent_rewards"), answer)
    return Outcome(_number("reward", result))


def reward_of_agents(outcome: Outcome, agent_ids: Iterable[str]) -> float | None:
    """Return the reward of the episode if the agent's result decides it, or None if the run's rewards do.

    With `agent_rewards` alone, the episode's reward is their mean.

    Args:
        outcome: result of the agent.
        agent_ids: model names that the agent requested.

    Raises:
        ValueError: `agent_rewards` names a model that was never requested, or omits a requested one that then has no
            reward.
    """
    if outcome.agent_names:  # the environment knows its agents, some of which may have requested nothing
        return outcome.reward
    rewards, requested = outcome.agent_rewards, sorted(set(agent_ids))
    if unknown := sorted(rewards.keys() - set(requested)):
        message = f"{', '.join(unknown)}; the models that were asked for are {', '.join(requested)}"
        raise ValueError(f"agent_rewards names {message}")
    if outcome.reward is not None or outcome.answer is not None or not rewards:
        return outcome.reward
    if missing := [agent_id for agent_id in requested if agent_id not in rewards]:
        hint = "which was asked for: name each agent, or also return a `reward` or an `answer` for the others"
        raise ValueError(f"agent_rewards leaves out {', '.join(missing)}, {hint}")
    return sum(rewards.values()) / len(rewards)


def _numbers(result: Mapping[str, Any], key: str) -> dict[str, float]:
    values = result.get(key) or {}
    if not isinstance(values, Mapping):
        raise TypeError(f"the agent's {key} is {values!r:.60}; it must be a mapping from names to numbers")
    return {str(name): _number(f"{key}[{name!r}]", value) for name, value in values.items()}


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"the agent's {name} is {value!r:.60}; it must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"the agent's {name} is {value!r:.60}; it must be finite")
    return number
