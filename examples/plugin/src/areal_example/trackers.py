"""A tracker: where the metrics of a run go, step by step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from areal_core.plugins import register
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import TextIO


@register("trackers")
class MetricLines:
    """Write the metrics of each step as a line of JSON into the run folder."""

    def __init__(
        self, file: Annotated[str, Field(min_length=1, description="Name of the file.")] = "lines.jsonl"
    ) -> None:
        self._name = file
        self._file: TextIO | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Open the file. A resumed run goes on in it."""
        del config
        self._file = (run_dir / self._name).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step."""
        assert self._file is not None
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
