"""Messages from the evaluator to its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_core.processes import Message


class EpisodesExpected(Message):
    """The engine is ready; `count` episodes will run."""

    count: int


class EpisodePlayed(Message):
    """An episode has ended. `line` is its line in `samples.jsonl`."""

    line: Mapping[str, Any]
