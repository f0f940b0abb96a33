"""From a session that has ended to the episode of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.outcomes import reward_of_agents
from areal_agents.requests import REQUESTS
from areal_agents.trajectories import answer_rewards, ends, trajectories
from areal_core.data import Episode

if TYPE_CHECKING:
    from areal_agents.config import ConversationSettings
    from areal_agents.conversations import Turn
    from areal_agents.outcomes import Outcome
    from areal_agents.session import Session
    from areal_core.sdk import RewardScore, WorkflowContext

COUNTED: tuple[str, ...] = ("answers", "calls", "malformed_calls", "tool_errors", "lost_answers", "other_sampling")
COUNTED += ("rewritten_prefixes", "ambiguous_prefixes", *REQUESTS.values(), "streamed_requests")
"""Of each episode, for metrics."""


async def make_episode(
    session: Session, outcome: Outcome, context: WorkflowContext, settings: ConversationSettings, seconds: float
) -> Episode:
    """The trajectories of an episode, and its reward.

    Args:
        session: what was said in it.
        outcome: what the agent says that it was worth.
        context: scores it otherwise.
        settings: which conversations are trained on, and what earlier ones are worth.
        seconds: that it took.

    Raises:
        ValueError: the policy was asked for nothing, or something is to be rewarded that is not there.
    """
    turns = session.conversations.turns
    ended = ends(turns, settings.trained)
    if not ended:
        raise ValueError("the agent has asked the policy for nothing that it received: there is nothing to train on")
    own = answer_rewards(turns, outcome.turn_rewards)
    agent_ids = [turn.agent_id for turn in turns]
    reward, rewards = reward_of_agents(outcome, agent_ids), dict(outcome.rewards)
    if reward is None:
        score = await _scored(turns[-1], outcome.answer, context)
        reward = score.value + sum(outcome.turn_rewards.values())
        rewards = {**score.components, **rewards}
    discounts = [settings.turn_discount ** agent_ids[turns.index(end) + 1 :].count(end.agent_id) for end in ended]
    worth = [outcome.agent_rewards.get(e.agent_id, reward) * d for e, d in zip(ended, discounts, strict=True)]
    metrics = {f"agents/{name}": float(session.counts[name]) for name in COUNTED}
    metrics |= {f"agents/{name}": float(n) for name, n in session.counts.items() if name.startswith("other_sampling/")}
    metrics |= {"agents/turns": float(len(turns)), "agents/conversations": float(len(ended))}
    metrics |= {"agents/generating_s": session.generating_s, "agents/elsewhere_s": seconds - session.generating_s}
    texts = [context.tokenizer.decode(end.ids) for end in ended]
    text = texts[0] if len(texts) == 1 else "\n".join(f"[{e.agent_id}] {t}" for e, t in zip(ended, texts, strict=True))
    learned = trajectories(ended, own, [value - reward for value in worth])
    return Episode(learned, reward, {**outcome.agent_rewards, **rewards}, text=text, metrics=metrics)


async def _scored(turn: Turn, answer: str | None, context: WorkflowContext) -> RewardScore:
    prompt = context.tokenizer.decode(turn.prompt.ids)
    return await context.score(
        prompt=prompt,
        completion=turn.answer.message["content"] if answer is None else answer,
        completion_ids=turn.generation.output_ids,
        finish_reason=turn.generation.finish_reason,
    )
