"""Token ids in, token ids out, as vLLM's `/inference/v1/generate` has it; verifiers' environments ask so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, RefusedError, positive, stop_texts
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event

HONORED = frozenset({"model", "sampling_params", "stream", "token_ids"})
"""Keys of a request that the endpoint follows."""
SETTINGS = frozenset({"max_tokens", "n", "output_kind", "stop"})
"""The same of `sampling_params`."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """A request; raises `RefusedError`."""
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
    """Return settings without `logprobs: 0` and `1`: the log-probability of the sampled token is always there."""
    return {name: value for name, value in settings.items() if name != "logprobs" or value not in (0, 1)}


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """An answer as a whole."""
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
    """A token's text would be ambiguous: vLLM names it by its id here, and clients hold it against `token_ids`."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.generation.output_ids, turn.generation.logprobs, strict=True)
    ]


def stream(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> Iterator[Event]:
    """Nobody asks for it in pieces."""
    yield "", write(body, turns, reader)
