"""Where metrics go, besides the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch


class Tracker(Protocol):
    """Takes the metrics of each step. An exception is reported once and switches the tracker off; the run goes on."""

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Once, before the first step; `config` holds no secrets."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a step, and once an evaluation."""

    def close(self) -> None:
        """Flush and end; safe to call twice."""


@runtime_checkable
class BatchTracker(Tracker, Protocol):
    """A tracker that takes what the policy wrote as well."""

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """Once a step: a few groups of its batch, as the hook `areal_batch_logged` gives them."""
