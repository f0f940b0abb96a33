"""Several parts of the policy's in one episode, and rewards of their own."""

from __future__ import annotations

import pytest
from policies import Policy

from areal_core.data import PackedBatch
from areal_core.data.packing import pack_group

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow


def policy(template: str = "chat") -> Policy:
    return Policy(template, lambda number: f"answer {number}")


def ask(client: openai.OpenAI, agent_id: str, *messages: str) -> str:
    roles = ("user", "assistant")
    told = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    done = client.chat.completions.create(model=agent_id, messages=told)
    return done.choices[0].message.content


def plan_and_solve(result: object) -> object:
    def agent(base_url: str, api_key: str) -> object:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            plan = ask(client, "planner", "Plan it.")
            ask(client, "solver", f"Follow this: {plan}")
        return result

    return agent


def test_each_agent_has_its_own_reward(play):
    episode = play(policy(), plan_and_solve({"agent_rewards": {"planner": 0.25, "solver": 1}}))
    assert episode.reward == 0.625
    assert [t.agent_id for t in episode.trajectories] == ["planner", "solver"]
    batch = PackedBatch.from_columns(pack_group(0, (0, 0), 1, {0: episode}))
    assert batch["reward"].tolist() == [0.25, 1.0]
    assert episode.rewards == {"planner": 0.25, "solver": 1.0}, "for the metrics"


def test_an_agent_without_one_has_the_episodes(play):
    episode = play(policy(), plan_and_solve({"reward": 3, "agent_rewards": {"planner": 1}}))
    assert episode.reward == 3.0
    assert pack_group(0, (0, 0), 1, {0: episode})["sequences.reward"].tolist() == [1.0, 3.0]


def test_an_agent_nobody_asked_for_is_refused(play):
    with pytest.raises(ValueError, match="agent_rewards names judge; the models that were asked for are planner, sol"):
        play(policy(), plan_and_solve({"agent_rewards": {"judge": 1}}))


def test_an_agent_who_is_left_out_is_refused(play):
    with pytest.raises(ValueError, match="agent_rewards leaves out solver, which was asked for: name each agent, or"):
        play(policy(), plan_and_solve({"agent_rewards": {"planner": 1}}))


def test_samples_show_what_each_agent_said(play):
    text = play(policy(), plan_and_solve(1.0)).text
    assert text.index("[planner]") < text.index("Plan it.") < text.index("[solver]") < text.index("Follow this")


def test_what_came_before_is_worth_less_if_asked(play):
    """Each answer begins a conversation of its own, as where a template takes thoughts out."""

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for number in range(3):
                ask(client, "policy", f"Step {number}.")
        return 2.0

    played = [play(policy(), agent, turn_discount=discount) for discount in (1.0, 0.5)]
    found = [PackedBatch.from_columns(pack_group(0, (0, 0), 1, {0: episode})) for episode in played]
    assert found[0]["reward"].tolist() == [2.0, 2.0, 2.0]
    assert found[1]["reward"].tolist() == [0.5, 1.0, 2.0]
