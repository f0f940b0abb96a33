"""Files of JSON lines, as they are read where a crash or a disk may have damaged some."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read_lines(
    path: Path, is_whole: Callable[[Any], bool], most_bytes: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines of a file, and how many of them cannot be read; nothing where there is no file.

    Args:
        path: of the file.
        is_whole: whether a line has what it needs.
        most_bytes: of the file, its last; None reads it whole.
    """
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        skipped = most_bytes is not None and path.stat().st_size > most_bytes
        if skipped:
            file.seek(-(most_bytes or 0), 2)
            file.readline()  # the rest of a line
        written = file.read().splitlines()
    read = [line for line in map(_parsed, written) if is_whole(line)]
    return read, len(written) - len(read)


def is_metrics(line: Any) -> bool:
    """Whether a line holds a step and numbers, as those of `metrics.jsonl` do."""
    return isinstance(line, dict) and "step" in line and all(isinstance(value, int | float) for value in line.values())


def is_group(line: Any) -> bool:
    """Whether a line holds a version and its episodes, as those of `samples.jsonl` do."""
    return isinstance(line, dict) and isinstance(line.get("version"), int) and _are_episodes(line.get("episodes"))


def _are_episodes(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(one, dict) and isinstance(one.get("text"), str) and isinstance(one.get("reward"), int | float)
        for one in found
    )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
