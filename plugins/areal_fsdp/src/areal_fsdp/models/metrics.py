"""Metrics of an optimizer update."""

from __future__ import annotations

from areal_core.data import Metric


def means(**values: float) -> dict[str, Metric]:
    """Numbers of one update, to be averaged over the updates of a step."""
    return {name: Metric.mean(value) for name, value in values.items()}
