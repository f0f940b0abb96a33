"""Build the trajectories that are trained on from the answers of an episode."""

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
    """Return the last answers of the conversations that are trained on.

    If a request got several answers and the agent continued some, only those count. If it continued none, all count,
    because the reward may be for any of them.

    Args:
        turns: all answers of an episode, in order.
        trained: "all" conversations, the "last" to get an answer, or the "longest" by tokens.
    """
    choices: defaultdict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        choices[id(turn.prompt)].append(turn)
    candidates = [turn for turn in turns if not turn.children and not any(t.children for t in choices[id(turn.prompt)])]
    if not candidates:
        return []
    if trained == "longest":
        return [max(candidates, key=lambda turn: turn.length)]
    return candidates if trained == "all" else candidates[-1:]


def answer_rewards(turns: Sequence[Turn], turn_rewards: Mapping[str, float]) -> dict[int, float]:
    """Return the rewards of single answers, by the `id` of the turn.

    Args:
        turns: all answers of an episode.
        turn_rewards: rewards by identifier. A further answer to one request is named by the first one's identifier and
            its own index: `ID/INDEX`.

    Raises:
        ValueError: an identifier belongs to no answer.
    """
    names: dict[str, Turn] = {}
    first: dict[int, tuple[str, int]] = {}
    for turn in turns:
        name, number = first.get(id(turn.prompt), (turn.identifier, 0))
        first[id(turn.prompt)] = name, number + 1
        names |= {turn.identifier: turn, f"{name}/{number}": turn}
    if unknown := sorted(turn_rewards.keys() - names.keys()):
        raise ValueError(f"turn_rewards names {', '.join(unknown)}, which is not an answer that this episode received")
    rewards: dict[int, float] = {}
    for name, value in turn_rewards.items():
        rewards[id(names[name])] = rewards.get(id(names[name]), 0.0) + value
    return rewards


def trajectories(ended: Sequence[Turn], rewards: Mapping[int, float], extra: Sequence[float]) -> list[Trajectory]:
    """Return a trajectory for each conversation. An answer that several share is trained on only in the first one.

    Args:
        ended: last answers of the conversations; see `ends`.
        rewards: rewards of answers; see `answer_rewards`.
        extra: reward of each conversation in addition to the episode's.
    """
    seen: set[int] = set()
    built = []
    for end, extra_reward in zip(ended, extra, strict=True):
        builder, rewards_of_turns = TrajectoryBuilder(), []
        for turn in end.path():
            builder.add_context(turn.prompt.context_ids)
            if id(turn) in seen:
                builder.add_context(turn.generation.output_ids)
                continue
            seen.add(id(turn))
            builder.add_generation(turn.generation)
            rewards_of_turns.append(rewards.get(id(turn), 0.0))
        turn_rewards = {"turn_rewards": np.array(rewards_of_turns, np.float32)}
        built.append(builder.build(turns=turn_rewards, agent_id=end.agent_id, reward=extra_reward))
    return built
