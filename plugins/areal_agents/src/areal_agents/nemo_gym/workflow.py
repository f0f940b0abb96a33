"""Play episodes of a resources server of NeMo Gym."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from areal_agents.foreign_http import SHOWN_CHARACTERS
from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.nemo_gym.server import ResourcesServer
from areal_agents.outcomes import Outcome
from areal_agents.workflow import EndpointWorkflow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.nemo_gym.config import NemoGymSettings
    from areal_agents.nemo_gym.server import ResourcesSession
    from areal_core.sdk import Endpoint

PARAMETERS = "responses_create_params"
"""Key of a row with the request for the policy's first answer."""


class NemoGymWorkflow(EndpointWorkflow):
    """The policy answers and calls the tools of a resources server, which then verifies the episode.

    The loop is that of NeMo Gym's `simple_agent`: it ends with an answer without tool calls, with an answer that was
    cut off, after `max_steps` answers, or when the context is full.

    Args:
        settings: the server, and what is trained on.
    """

    def __init__(self, settings: NemoGymSettings) -> None:
        super().__init__(settings)
        self._max_steps = settings.max_steps
        self._server = ResourcesServer(settings)

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why an episode cannot be played for a row; empty if it can."""
        del tokenizer
        parameters = row.get(PARAMETERS)
        if isinstance(parameters, dict) and isinstance(parameters.get("input"), str | list):
            return ""
        return f"a row has no `{PARAMETERS}` with an `input`, only {', '.join(row)}: use the data set agents/nemo_gym"

    async def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Outcome:
        """Play one episode; see `EndpointWorkflow.play`."""
        async with self._server.seed(row) as session, _Policy(row[PARAMETERS], endpoint) as policy:
            response = await self._answer(policy, session)
            reward, numbers = await session.verify(row, response)
        return Outcome(reward, numbers)

    async def close(self) -> None:
        """End the server and the endpoint."""
        await self._server.close()
        await super().close()

    async def _answer(self, policy: _Policy, session: ResourcesSession) -> dict[str, Any]:
        """Let the policy answer and call tools. Return its last response, with the items of the whole episode."""
        for _ in range(self._max_steps):
            calls = await policy.answer()
            if not calls:
                break
            for call in calls:
                policy.items.append(
                    {
                        "type": "function_call_output",
                        "call_id": call["call_id"],
                        "output": await _call(session, policy.tools, call),
                    }
                )
        return policy.response


class _Policy:
    """The policy in one episode.

    Args:
        parameters: request for the first answer.
        endpoint: of the model.

    Attributes:
        items: answers and outputs of tools so far.
        tools: names of the tools that the policy is offered.
    """

    def __init__(self, parameters: Mapping[str, Any], endpoint: Endpoint) -> None:
        question = parameters["input"]
        self.items: list[dict[str, Any]] = []
        self.tools = {tool.get("name") for tool in parameters.get("tools") or ()}
        self._parameters = {**parameters, "model": endpoint.model}
        self._input = [{"role": "user", "content": question}] if isinstance(question, str) else question
        self._url = f"{endpoint.base_url}/responses"
        self._client = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {endpoint.api_key}"}, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._last: dict[str, Any] = {}
        self._usage: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    @property
    def response(self) -> dict[str, Any]:
        """The last response, with the items and the tokens of all answers."""
        usage = {**(self._last.get("usage") or {}), **self._usage}
        return {**self._last, "output": self.items, "usage": usage or None}

    async def answer(self) -> list[dict[str, Any]]:
        """Ask for the next answer and return its tool calls. There are none if it was cut off or the context is full.

        Raises:
            EnvironmentServerError: the endpoint refused the request.
        """
        body = {**self._parameters, "input": [*self._input, *self.items]}
        async with self._client.post(self._url, json=body) as answer:
            text = await answer.text()
        if answer.status != 200:
            if self._last and _error_code(text) == "context_length_exceeded":
                return []
            raise EnvironmentServerError(f"the model's endpoint answered {answer.status}: {text[:SHOWN_CHARACTERS]}")
        self._last = json.loads(text)
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            self._usage[name] = self._usage.get(name, 0) + (self._last.get("usage") or {}).get(name, 0)
        output = self._last["output"]
        self.items += output
        if self._last.get("incomplete_details"):
            return []
        return [item for item in output if item["type"] == "function_call"]


def _error_code(text: str) -> Any:
    """Return the code of an error of the endpoint; None if the text is something else."""
    try:
        return json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None


async def _call(session: ResourcesSession, tools: set[Any], call: Mapping[str, Any]) -> str:
    """Return the output of a tool call. What is wrong with a call is the policy's to read."""
    if call["name"] not in tools:  # also /verify and /seed_session, which are routes like those of tools
        return json.dumps({"error": f"There is no tool {call['name']}"})
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
    return await session.call(call["name"], arguments)
