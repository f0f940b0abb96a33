"""Play episodes in an environment of verifiers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.outcomes import Outcome
from areal_agents.verifiers.server import EnvironmentServer
from areal_agents.workflow import EndpointWorkflow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_agents.verifiers.config import VerifiersSettings
    from areal_agents.verifiers.traces import Trace
    from areal_core.sdk import Endpoint


class VerifiersWorkflow(EndpointWorkflow):
    """An environment of verifiers plays the episode, and the policy answers at this process's endpoint.

    Each trace is a conversation of its own: the policy learns from it with the reward and under the name of its agent,
    unless the environment says that it is not trained on. A taskset without rewards is scored by the run's rewards.

    Args:
        settings: the taskset, the server, and what is trained on.
    """

    session_header: ClassVar[str] = "X-Session-ID"
    """verifiers sends the identifier of the trace."""

    def __init__(self, settings: VerifiersSettings) -> None:
        super().__init__(settings)
        self._server = EnvironmentServer(settings)

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why an episode cannot be played for a row; empty if it can."""
        del tokenizer
        if isinstance(row.get("task"), dict):
            return ""
        return f"a row has no `task` with the data of a task, only {', '.join(row)}: use the data set agents/verifiers"

    async def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Outcome:
        """Play one episode; see `EndpointWorkflow.play`."""
        traces = await self._server.play(row["task"], endpoint)
        trained = {identifier: trace for identifier, trace in traces.items() if trace.is_trained and trace.has_answers}
        if not trained:
            raise EnvironmentServerError("the environment has no trace to train on: no trained agent asked the model")
        names = {identifier: trace.agent for identifier, trace in trained.items()}
        figures = _named(traces.values())
        if not any(trace.rewards for trace in trained.values()):
            return Outcome(rewards=figures, agent_names=names)
        rewards = {identifier: sum(trace.rewards.values()) for identifier, trace in trained.items()}
        return Outcome(sum(rewards.values()) / len(rewards), figures, agent_rewards=rewards, agent_names=names)

    async def close(self) -> None:
        """End the server and the endpoint."""
        await self._server.close()
        await super().close()


def _named(traces: Iterable[Trace]) -> dict[str, float]:
    """Return the mean of each reward and metric. If there are several agents, each name begins with its agent's."""
    traces = list(traces)
    has_several = len({trace.agent for trace in traces}) > 1
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trace in traces:
        for name, value in {**trace.metrics, **trace.rewards}.items():
            values[f"{trace.agent}/{name}" if has_several else name].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
