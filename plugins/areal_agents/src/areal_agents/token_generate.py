"""vLLM's `/inference/v1/generate`: token ids in, token ids out. The library verifiers uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, RefusedError, positive, stop_texts
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event
    from areal_agents.streams import AnswerStream

HONORED = frozenset({"model", "sampling_params", "stream", "token_ids"})
"""Request keys that the endpoint honors."""
SETTINGS = frozenset({"max_tokens", "n", "output_kind", "stop"})
"""Keys of `sampling_params` that the endpoint honors."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """Parse a request.

    Raises:
        RefusedError: a key has an invalid value.
    """
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RefusedError("token_ids must be a list of at least one token id")
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise RefusedError("sampling_params must be an object")
    return AgentRequest(
        messages=(),
        prompt_ids=ids,
        count=positive(settings, "n") or 1,
        max_tokens=positive(settings, "max_tokens"),
        stop=stop_texts(settings.get("stop"), "stop"),
        not_honored=(*not_honored(body, HONORED), *not_honored(_without_sampled_logprob(settings), SETTINGS)),
        model=str(body.get("model") or ""),
    )


def _without_sampled_logprob(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without `logprobs: 0` or `1`: the sampled token's log-probability is always in the response."""
    return {name: value for name, value in settings.items() if name != "logprobs" or value not in (0, 1)}


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """Return the complete response."""
    del body, reader
    choices = [
        {
            "index": number,
            "token_ids": turn.generation.output_ids,
            "logprobs": {"content": _logprobs(turn)},
            "finish_reason": "length" if turn.generation.finish_reason is FinishReason.LENGTH else "stop",
        }
        for number, turn in enumerate(turns)
    ]
    return {"request_id": turns[0].identifier, "choices": choices, "prompt_token_ids": turns[0].prompt.ids}


def _logprobs(turn: Turn) -> list[dict[str, Any]]:
    """Return log-probabilities by token id, as vLLM does here: clients compare the ids with `token_ids`."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.generation.output_ids, turn.generation.logprobs, strict=True)
    ]


async def stream(body: Mapping[str, Any], answers: AnswerStream, reader: AnswerReader) -> AsyncIterator[Event]:
    """Yield the complete response as one event, because no client streams this protocol."""
    yield "", write(body, await answers.answering, reader)
