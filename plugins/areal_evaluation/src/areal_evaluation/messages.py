"""From the evaluator to its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.processes import Message


class EpisodesExpected(Message):
    """The engine is ready, and so many episodes will be played."""

    count: int


class EpisodePlayed(Message):
    """An episode has ended; `line` is what stands of it in `samples.jsonl`."""

    line: Mapping[str, Any]
