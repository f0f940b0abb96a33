"""Find the options of a request that the endpoint does not honor.

Every key of a request is honored, is harmless, or is named by `not_honored`. No key is silently ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

HARMLESS: Final = frozenset(
    {
        "cache_control",
        "cache_salt",
        "client_metadata",
        "inference_geo",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Request keys that do not affect answers."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "detokenize": True,
    "include": ["reasoning.encrypted_content"],
    "include_reasoning": True,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream_reasoning": True,
    "thinking": {"type": "disabled"},
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Values that request what the endpoint does anyway. For keys not listed here: null, false and empty values."""


def not_honored(body: Mapping[str, Any], honored: Collection[str]) -> tuple[str, ...]:
    """Return the names of a request's options that the answer does not follow.

    Args:
        body: body of the request.
        honored: keys that the protocol's module reads.
    """
    unknown = [key for key in body if key not in honored and key not in HARMLESS and _changes_something(key, body[key])]
    return (*unknown, *_tool_options(body))


def _changes_something(key: str, value: Any) -> bool:
    """Return whether a value differs from what the endpoint does anyway."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    if value is None or value in ("", [], {}):
        return False
    if key in DEFAULTS:
        return bool(value != DEFAULTS[key])
    return value is not False  # 0 is a setting: `seed: 0`, `temperature: 0`


def _tool_options(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield options that constrain tool calls: the endpoint can neither force a call nor its form."""
    choice = body.get("tool_choice") or "auto"
    settings = choice if isinstance(choice, dict) else {"type": choice}
    if settings.get("type") not in ("auto", "none"):
        yield "tool_choice"
    if settings.get("disable_parallel_tool_use"):
        yield "tool_choice.disable_parallel_tool_use"
    for tool in body["tools"] if isinstance(body.get("tools"), list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            yield "tools.strict"
            return
