"""From the answers of an episode to the trajectories that are trained on."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import numpy as np

from areal_core.data import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_agents.conversations import Turn
    from areal_core.data import Trajectory

Trained = Literal["all", "last", "longest"]


def ends(turns: Sequence[Turn], trained: Trained) -> list[Turn]:
    """The last answers of the conversations that are trained on.

    Of several choices for one request those count that were continued, and where none was, all: nobody knows which of
    them the reward is for.

    Args:
        turns: all answers of an episode, in order.
        trained: "all" conversations, the "last" to get an answer, or the "longest" by tokens.
    """
    choices: defaultdict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        choices[id(turn.prompt)].append(turn)
    found = [turn for turn in turns if not turn.children and not any(t.children for t in choices[id(turn.prompt)])]
    if not found:
        return []
    if trained == "longest":
        return [max(found, key=lambda turn: turn.length)]
    return found if trained == "all" else found[-1:]


def answer_rewards(turns: Sequence[Turn], turn_rewards: Mapping[str, float]) -> dict[int, float]:
    """The reward of each answer by itself, by `id`.

    Args:
        turns: all answers of an episode.
        turn_rewards: by identifier; that of a choice other than the first of its request has `/NUMBER` behind it.

    Raises:
        ValueError: an identifier is that of no answer.
    """
    names: dict[str, Turn] = {}
    first: dict[int, tuple[str, int]] = {}
    for turn in turns:
        name, number = first.get(id(turn.prompt), (turn.identifier, 0))
        first[id(turn.prompt)] = name, number + 1
        names |= {turn.identifier: turn, f"{name}/{number}": turn}
    if unknown := sorted(turn_rewards.keys() - names.keys()):
        raise ValueError(f"turn_rewards names {', '.join(unknown)}, which is not an answer that this episode received")
    found: dict[int, float] = {}
    for name, value in turn_rewards.items():
        found[id(names[name])] = found.get(id(names[name]), 0.0) + value
    return found


def trajectories(ended: Sequence[Turn], rewards: Mapping[int, float], extra: Sequence[float]) -> list[Trajectory]:
    """One for each conversation. An answer that several share is learned from in the first of them alone.

    Args:
        ended: see `ends`.
        rewards: see `answer_rewards`.
        extra: the reward of each beside the episode's.
    """
    seen: set[int] = set()
    found = []
    for end, extra_reward in zip(ended, extra, strict=True):
        builder, own = TrajectoryBuilder(), []
        for turn in end.path():
            builder.add_context(turn.prompt.context_ids)
            if id(turn) in seen:
                builder.add_context(turn.generation.output_ids)
                continue
            seen.add(id(turn))
            builder.add_generation(turn.generation)
            own.append(rewards.get(id(turn), 0.0))
        turn_rewards = {"turn_rewards": np.array(own, np.float32)}
        found.append(builder.build(turns=turn_rewards, agent_id=end.agent_id, reward=extra_reward))
    return found
