"""What an agent says that its episode was worth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS = ("reward", "rewards", "turn_rewards", "agent_rewards", "answer")
_PREFIX = re.compile("^(chatcmpl-|resp_|msg_)")
"""Before the identifiers of answers, by protocol."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one episode.

    Attributes:
        reward: None where the run's rewards decide.
        rewards: named components, for metrics.
        turn_rewards: by the identifiers of answers; parts of the reward.
        agent_rewards: by the model that was asked for; in place of the reward, for the conversations with that.
        answer: text that the run's rewards score; None for the policy's last answer.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None


def read_outcome(result: Any) -> Outcome:
    """From what an agent returned, or its last line said.

    Raises:
        TypeError, ValueError: it is nothing that `Agent` describes.
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
    """The reward of the episode, so far as its agent says it: the mean of the agents' where there is no other.

    Args:
        outcome: what the agent says.
        agent_ids: the models that it asked for.

    Raises:
        ValueError: an agent is rewarded whom nobody asked for, or one would be left without a reward.
    """
    rewards, asked = outcome.agent_rewards, sorted(set(agent_ids))
    if unknown := sorted(rewards.keys() - set(asked)):
        message = f"{', '.join(unknown)}; the models that were asked for are {', '.join(asked)}"
        raise ValueError(f"agent_rewards names {message}")
    if outcome.reward is not None or outcome.answer is not None or not rewards:
        return outcome.reward
    if missing := [agent_id for agent_id in asked if agent_id not in rewards]:
        words = "who was asked for: name each agent, or return a `reward` or an `answer` beside it for the others"
        raise ValueError(f"agent_rewards leaves out {', '.join(missing)}, {words}")
    return sum(rewards.values()) / len(rewards)


def _numbers(result: Mapping[str, Any], key: str) -> dict[str, float]:
    found = result.get(key) or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"the agent's {key} is {found!r:.60}; it must be a mapping from names to numbers")
    return {str(name): _number(f"{key}[{name!r}]", value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"the agent's {name} is {value!r:.60}; it must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"the agent's {name} is {value!r:.60}; it must be finite")
    return number
