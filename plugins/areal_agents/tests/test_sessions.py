"""Agents that an environment tells apart by a header of their requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
from policies import Policy

from areal_agents.config import EndpointSettings
from areal_agents.outcomes import Outcome
from areal_agents.workflow import EndpointWorkflow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import Episode
    from areal_core.sdk import Endpoint

QUESTION = {"role": "user", "content": "7?"}
ANSWER = {"role": "assistant", "content": "7"}
MORE = {"role": "user", "content": "And now?"}


class TwoAgents(EndpointWorkflow):
    """Two agents ask the same question, get the same answer, and continue it in turn."""

    session_header: ClassVar[str] = "X-Session-ID"
    names: ClassVar[dict[str, str]] = {"a1": "first", "b2": "second"}

    async def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Outcome:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as client:
            for messages in ([QUESTION], [QUESTION, ANSWER, MORE]):
                for session in ("a1", "b2"):
                    async with client.post(
                        f"{endpoint.base_url}/chat/completions",
                        json={"model": endpoint.model, "messages": messages},
                        headers={"X-Session-ID": session},
                    ) as answer:
                        assert answer.status == 200, await answer.text()
        return Outcome(0.5, agent_rewards={"a1": 1.0, "b2": 0.0}, agent_names=self.names)


def play(workflow_class: type[TwoAgents]) -> Episode:
    async def run() -> Episode:
        workflow = workflow_class(EndpointSettings())
        try:
            return await workflow.run_episode({}, Policy("chat", lambda _: "7").context)
        finally:
            await workflow.close()

    return asyncio.run(run())


def test_each_agent_continues_its_own_answer_where_both_got_the_same_one() -> None:
    episode = play(TwoAgents)
    assert [trajectory.agent_id for trajectory in episode.trajectories] == ["first", "second"]
    assert [int(trajectory.tokens["turn_ids"].max()) + 1 for trajectory in episode.trajectories] == [2, 2]
    assert episode.metrics["agents/ambiguous_prefixes"] == 0
    assert [trajectory.reward for trajectory in episode.trajectories] == [0.5, -0.5]
    assert episode.reward == 0.5
    assert episode.rewards == {}, "the identifiers of sessions are in no other episode, so they name no metric"


def test_an_agent_without_a_name_is_not_trained_on() -> None:
    class OneIsFrozen(TwoAgents):
        names: ClassVar[dict[str, str]] = {"a1": "first"}

    (trajectory,) = play(OneIsFrozen).trajectories
    assert trajectory.agent_id == "first"
