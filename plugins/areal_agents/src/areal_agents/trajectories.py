"""From the answers of an episode to the trajectories that are trained on."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import torch

from areal_core.data import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_agents.conversations import Turn
    from areal_core.data import Trajectory

Trained = Literal["all", "last", "longest"]


def ends(turns: Sequence[Turn], trained: Trained) -> list[Turn]:
    """The last answers of the conversations that are trained on.

    Of several answers to the same tokens those count that were continued, and else the last one: the others were
    thrown away, by a client that chose or that asked again.

    Args:
        turns: all answers of an episode, in order.
        trained: "all" conversations, the "last" to get an answer, or the "longest" by tokens.
    """
    siblings: defaultdict[tuple[int, tuple[int, ...]], list[Turn]] = defaultdict(list)
    for turn in turns:
        siblings[id(turn.prompt.parent), tuple(turn.prompt.context_ids)].append(turn)
    found = []
    for same in siblings.values():
        if not any(turn.children for turn in same):
            found.append(same[-1])
    if not found:
        return []
    places = {id(turn): place for place, turn in enumerate(turns)}
    if trained == "last":
        return [max(found, key=lambda turn: places[id(turn)])]
    if trained == "longest":
        return [max(found, key=lambda turn: len(turn.ids))]
    return sorted(found, key=lambda turn: places[id(turn)])


def trajectories(ended: Sequence[Turn], turn_rewards: Mapping[str, float]) -> list[Trajectory]:
    """One for each conversation. An answer that several share is learnt from in the first of them alone.

    Args:
        ended: see `ends`.
        turn_rewards: what answers have earned by themselves, by identifier; 0 for those that are not named.
    """
    seen: set[int] = set()
    found = []
    for end in ended:
        builder, rewards = TrajectoryBuilder(), []
        for turn in end.path():
            builder.add_context(turn.prompt.context_ids)
            if id(turn) in seen:
                builder.add_context(turn.generation.output_ids)
                continue
            seen.add(id(turn))
            builder.add_generation(turn.generation)
            rewards.append(turn_rewards.get(turn.identifier, 0.0))
        found.append(builder.build(turns={"turn_rewards": torch.tensor(rewards, dtype=torch.float32)}))
    return found
