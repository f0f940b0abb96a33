"""Read files of JSON lines, some of which a crash or a full disk may have damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
