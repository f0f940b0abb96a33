"""Where metrics go, besides the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Tracker(Protocol):
    """Takes the metrics of each step. An exception is reported once and switches the tracker off; the run goes on."""

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Once, before the first step; `config` holds no secrets."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a step, and once an evaluation."""

    def close(self) -> None:
        """Flush and end; safe to call twice."""
