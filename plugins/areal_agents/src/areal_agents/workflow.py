"""Workflows that serve the policy at an endpoint, and let something else run the episode."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from areal_agents.agents import FunctionAgent
from areal_agents.answers import AnswerReader
from areal_agents.endpoint import AgentEndpoint
from areal_agents.episodes import make_episode
from areal_agents.outcomes import read_outcome, reward_of_agents
from areal_agents.session import Session
from areal_core.processes import bypass_proxies
from areal_core.sdk import RewardScore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from typing import Any

    from areal_agents.config import AgentSettings, EndpointSettings
    from areal_agents.outcomes import Outcome
    from areal_core.data import Episode
    from areal_core.sdk import Endpoint, WorkflowContext

logger = logging.getLogger(__name__)


class EndpointWorkflow(ABC):
    """Base of workflows that serve the policy at an endpoint of this process, with a key for each episode.

    Args:
        settings: the endpoint, and which conversations are trained on.
    """

    session_header: ClassVar[str] = ""
    """See `AgentEndpoint`."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        bypass_proxies(hosts=[settings.host])
        self._reader: AnswerReader | None = None
        self._endpoint: AgentEndpoint | None = None
        self._starting = asyncio.Lock()

    @abstractmethod
    async def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Outcome:
        """Run one episode against an endpoint, and return its rewards.

        Args:
            row: row of the data set.
            endpoint: address, key and name of the model.

        Raises:
            Exception: the episode failed. It has no reward, and the run tries it again.
        """

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Run one episode; see `RolloutWorkflow.run_episode`."""
        settings, began_at = self._settings, time.monotonic()
        endpoint, reader = await self._serve(context)
        session = Session(
            context,
            reader,
            max_tokens=settings.max_tokens,
            most_answers=settings.max_answers,
            template_arguments=settings.chat_template_kwargs,
        )
        address = endpoint.open(session)
        try:
            outcome = await self.play(row, address)
        finally:
            endpoint.end(session)
        return await make_episode(session, outcome, context, settings, time.monotonic() - began_at)

    async def play_at(
        self,
        row: Mapping[str, Any],
        endpoint: Endpoint,
        score: Callable[[str | None], Awaitable[RewardScore]],
        agent_ids: Callable[[], Collection[str]],
    ) -> RewardScore:
        """Run one episode against another endpoint and return its reward. No tokens are recorded.

        Args:
            row: row of the data set.
            endpoint: endpoint of the model to evaluate.
            score: scores a text with the run's rewards; for None, the model's last answer.
            agent_ids: returns the model names that the agent has requested.
        """
        outcome = await self.play(row, endpoint)
        reward = reward_of_agents(outcome, agent_ids())
        if reward is not None:
            return RewardScore(reward, {**outcome.agent_rewards, **outcome.rewards})
        scored = await score(outcome.answer)
        return RewardScore(scored.value + sum(outcome.turn_rewards.values()), {**scored.components, **outcome.rewards})

    async def close(self) -> None:
        """Stop the endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _serve(self, context: WorkflowContext) -> tuple[AgentEndpoint, AnswerReader]:
        """Return the endpoint of this process and its reader. The first episode starts them."""
        async with self._starting:
            if self._endpoint is None or self._reader is None:
                reader = AnswerReader(context.tokenizer, self._settings.tool_form, self._settings.chat_template)
                endpoint = AgentEndpoint(
                    self._settings.host,
                    reader,
                    session_header=self.session_header,
                    refuses_other_sampling=self._settings.other_sampling == "refuse",
                    on_other_sampling=logger.warning,
                )
                await endpoint.start()
                self._endpoint, self._reader = endpoint, reader
        return self._endpoint, self._reader


class AgentWorkflow(EndpointWorkflow):
    """Runs the user's agent against the endpoint of this process.

    Args:
        settings: the agent, and which of its conversations are trained on.
        agent: function to call instead of the agent in the settings.
    """

    def __init__(self, settings: AgentSettings, agent: Callable[..., Any] | None = None) -> None:
        super().__init__(settings)  # before the import of the agent's file: clients read the proxy variables once
        self._agent = FunctionAgent(agent or settings.agent.build())

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why the agent cannot be called for a row, or an empty string if it can. Called before a run."""
        del tokenizer
        return self._agent.problem(row)

    async def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Outcome:
        """Call the agent; see `EndpointWorkflow.play`."""
        return read_outcome(await self._agent(row=row, endpoint=endpoint))
