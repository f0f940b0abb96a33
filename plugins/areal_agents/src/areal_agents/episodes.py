"""Build a run's episode from a session that has ended."""

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

COUNTED: tuple[str, ...] = (
    "answers",
    "calls",
    "malformed_calls",
    "tool_errors",
    "lost_answers",
    "other_sampling",
    "rewritten_prefixes",
    "ambiguous_prefixes",
    *REQUESTS.values(),
    "streamed_requests",
)
"""Counts of a session that become metrics `agents/NAME` of every episode."""


async def make_episode(
    session: Session, outcome: Outcome, context: WorkflowContext, settings: ConversationSettings, seconds: float
) -> Episode:
    """Return the trajectories and the reward of an episode.

    Args:
        session: the session that has ended.
        outcome: rewards or answer that the agent returned.
        context: scores the last answer if the agent returned no reward.
        settings: which conversations are trained on, and the discount of earlier ones.
        seconds: duration of the episode.

    Raises:
        ValueError: the policy gave no answer that the agent received, or a reward names an unknown answer or agent.
    """
    turns = session.conversations.turns
    if names := outcome.agent_names:
        turns = [turn for turn in turns if turn.agent_id in names]
    ended = ends(turns, settings.trained)
    if not ended:
        raise ValueError("the agent received no answer from the policy: there is nothing to train on")
    turn_rewards = answer_rewards(turns, outcome.turn_rewards)
    agent_ids = [turn.agent_id for turn in turns]
    reward, rewards = reward_of_agents(outcome, agent_ids), dict(outcome.rewards)
    if reward is None:
        score = await _scored(turns[-1], outcome.answer, context)
        reward = score.value + sum(outcome.turn_rewards.values())
        rewards = {**score.components, **rewards}
    discounts = [settings.turn_discount ** agent_ids[turns.index(end) + 1 :].count(end.agent_id) for end in ended]
    end_rewards = [outcome.agent_rewards.get(e.agent_id, reward) * d for e, d in zip(ended, discounts, strict=True)]
    agent_rewards = dict(outcome.agent_rewards)
    if names:
        agent_rewards = {}  # named by sessions, which are in no other episode
        for turn in turns:
            turn.agent_id = names[turn.agent_id]
    metrics = {f"agents/{name}": float(session.counts[name]) for name in COUNTED}
    metrics |= {f"agents/{name}": float(n) for name, n in session.counts.items() if name.startswith("other_sampling/")}
    metrics |= {"agents/turns": float(len(turns)), "agents/conversations": float(len(ended))}
    metrics |= {"agents/generating_s": session.generating_s, "agents/elsewhere_s": seconds - session.generating_s}
    texts = [context.tokenizer.decode(end.ids) for end in ended]
    text = texts[0] if len(texts) == 1 else "\n".join(f"[{e.agent_id}] {t}" for e, t in zip(ended, texts, strict=True))
    learned = trajectories(ended, turn_rewards, [end_reward - reward for end_reward in end_rewards])
    return Episode(learned, reward, {**agent_rewards, **rewards}, text=text, metrics=metrics)


async def _scored(turn: Turn, answer: str | None, context: WorkflowContext) -> RewardScore:
    prompt = context.tokenizer.decode(turn.prompt.ids)
    return await context.score(
        prompt=prompt,
        completion=turn.answer.message["content"] if answer is None else answer,
        completion_ids=turn.generation.output_ids,
        finish_reason=turn.generation.finish_reason,
    )
