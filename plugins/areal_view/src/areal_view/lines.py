"""Read files of JSON lines, some of which a crash or a full disk may have damaged, and turn metrics into columns."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

POINTS: Final = 2000
"""Maximum number of points of a curve."""


def read_lines(
    path: Path, is_whole: Callable[[Any], bool], max_bytes: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON lines of a file, and the number of lines that cannot be read. A missing file has no lines.

    Args:
        path: path of the file.
        is_whole: returns whether a line has the fields that it needs.
        max_bytes: read only the last bytes of the file; None: read all of it.
    """
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        skipped = max_bytes is not None and path.stat().st_size > max_bytes
        if skipped:
            file.seek(-(max_bytes or 0), 2)
            file.readline()  # skip the rest of a line
        raw_lines = file.read().splitlines()
    lines = [line for line in map(_parsed, raw_lines) if is_whole(line)]
    return lines, len(raw_lines) - len(lines)


def is_metrics(line: Any) -> bool:
    """Return whether a line has a step and numbers, as the lines of `metrics.jsonl` do."""
    return isinstance(line, dict) and "step" in line and all(isinstance(value, int | float) for value in line.values())


def is_group(line: Any) -> bool:
    """Return whether a line has a version and episodes, as the lines of `samples.jsonl` do."""
    return isinstance(line, dict) and isinstance(line.get("version"), int) and _are_episodes(line.get("episodes"))


def _are_episodes(episodes: Any) -> bool:
    return isinstance(episodes, list) and all(
        isinstance(episode, dict)
        and isinstance(episode.get("text"), str)
        and isinstance(episode.get("reward"), int | float)
        for episode in episodes
    )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` items, evenly spread, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]


def thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `POINTS` lines for curves, and also all lines with rare metrics, such as evaluations."""
    counts = Counter(key for line in lines for key in line)
    rare = {key for key, count in counts.items() if count <= POINTS}
    kept = {id(line) for line in spread(lines, POINTS)}
    return [line for line in lines if id(line) in kept or rare & line.keys()] if len(lines) > POINTS else list(lines)


def metrics_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics as columns, with None for steps that lack a metric."""
    keys = sorted({key for line in lines for key in line} - {"step", "time"})
    return {
        "step": [line["step"] for line in lines],
        "time": [line.get("time") for line in lines],
        "columns": {key: [line.get(key) for line in lines] for key in keys},
    }
