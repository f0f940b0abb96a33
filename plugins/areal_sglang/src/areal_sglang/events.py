"""What SGLang says while it answers, as far as it is read here."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from areal_core.servers import Span  # noqa: TC001 - msgspec reads annotations


class _Logprob(msgspec.Struct, array_like=True, gc=False):
    """Of a token; its id, which comes behind it, comes by itself too."""

    value: float


class Reason(msgspec.Struct):
    """Why it ended; `matched` is the stop token or text."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None


class _Told(msgspec.Struct):
    completion_tokens: int
    finish_reason: Reason | None
    prompt_tokens: int = 0  # not said of a request that was aborted while it waited
    output_token_logprobs: list[_Logprob] | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Told | None = None
    error: dict[str, Any] | None = None


EVENTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event)
