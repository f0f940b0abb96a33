"""A tracker: where metrics go beside the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_outside.config import LinesSettings


class Lines:
    """A line for each number: step, value, name."""

    def __init__(self, settings: LinesSettings) -> None:
        self._settings = settings
        self._path: Path | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Before the first step."""
        self._path = (self._settings.folder or run_dir) / "lines.txt"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Of each step."""
        assert self._path is not None
        with self._path.open("a") as file:
            file.writelines(f"{step} {value!r} {name}\n" for name, value in metrics.items())

    def close(self) -> None:
        """There is nothing left to write."""
