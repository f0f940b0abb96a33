"""From the evaluator to its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.messages.codec import message


@message
class EpisodesExpected:
    """The engine is ready, and so many episodes will be played."""

    count: int


@message
class EpisodePlayed:
    """An episode has ended; `line` is what stands of it in `samples.jsonl`."""

    line: Mapping[str, Any]
