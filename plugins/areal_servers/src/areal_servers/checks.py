"""What is refused before a server sees it: requests that servers do not survive or do not honour, and wrong servers."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.inference import SamplingParameters
from areal_servers.interface import ServerRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.inference import GenerationRequest
    from areal_core.interfaces.model import ModelReference
    from areal_servers.interface import ServerIdentity

_ALWAYS = {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy"}
_SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")


def check_request(request: GenerationRequest, vocabulary: int, context: int, honoured: frozenset[str]) -> None:
    """Whether the servers can serve a request.

    A token outside of the vocabulary ends a server, whichever it is; so it must never be sent.

    Raises:
        ValueError: they cannot.
    """
    prompt, sampling, name = request.input_ids, request.sampling, request.request_id
    if not prompt:
        raise ValueError(f"request {name} has no input tokens")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ValueError(
            f"request {name} has token {max(prompt, key=abs)}, the model's vocabulary has {vocabulary} tokens"
        )
    if len(prompt) + sampling.max_new_tokens > context:
        raise ValueError(
            f"request {name} wants {len(prompt) + sampling.max_new_tokens} tokens ({len(prompt)} of prompt and "
            f"{sampling.max_new_tokens} new ones), but the servers take {context}"
        )
    asked = [
        setting.name
        for setting in fields(SamplingParameters)
        if setting.name not in honoured | _ALWAYS and getattr(sampling, setting.name) != setting.default
    ]
    if asked:
        raise ValueError(f"the servers do not support the sampling settings {', '.join(asked)}")
    if not 0 < sampling.temperature < float("inf"):
        raise ValueError(f"temperature is {sampling.temperature}, it must be a finite number above 0")
    if sampling.max_new_tokens < 1 or not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {sampling.max_new_tokens} and min_new_tokens {sampling.min_new_tokens}; "
            "at least one token is generated, and at most max_new_tokens"
        )


def check_identity(identity: ServerIdentity, model: ModelReference, description: Mapping[str, Any]) -> None:
    """Whether a server serves the run's model.

    Raises:
        ServerRefusedError: it serves another one, or in another dtype.
    """
    if identity.dtype and identity.dtype != model.dtype:
        raise ServerRefusedError(
            f"computes in {identity.dtype}, and the run in {model.dtype}: start it with --dtype {model.dtype}"
        )
    path = Path(identity.model) / "config.json"
    if not path.is_file():
        return  # on another machine; what it generates is compared with the trainer's model after the first update
    served = json.loads(path.read_text())
    different = [
        f"{key} {served.get(key)} instead of {description.get(key)}"
        for key in _SHAPE
        if served.get(key) != description.get(key)
    ]
    if different:
        raise ServerRefusedError(f"serves another model, {identity.model}: {', '.join(different)}")
