"""Events of SGLang's answers, with the fields that the adapter reads."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from areal_core.servers import Span  # noqa: TC001 - msgspec reads annotations


class _Logprob(msgspec.Struct, array_like=True, gc=False):
    """The first element of a token's entry. Its token id and text follow, and are not read."""

    value: float


class _InputLogprob(msgspec.Struct, array_like=True, gc=False):
    """The same for a token of the prompt. The first token has no value."""

    value: float | None


class _TopLogprob(msgspec.Struct, array_like=True, gc=False):
    """One of a token's likeliest tokens. Its text follows, and is not read."""

    value: float
    token: int


class Reason(msgspec.Struct):
    """Why an answer ended. `matched` is the stop token or text."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: int
    finish_reason: Reason | None
    prompt_tokens: int = 0  # missing if a request was aborted in the queue
    input_token_logprobs: list[_InputLogprob] | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_TopLogprob]] | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _MetaInfo | None = None
    error: dict[str, Any] | None = None


EVENTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event)
