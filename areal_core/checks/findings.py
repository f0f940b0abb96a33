"""What the child of a preflight reports to the driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from areal_core.plugins import Provenance  # noqa: TC001 - msgspec reads the annotation

FINDINGS_FILE: Final = "findings.json"
"""Name of the file that the child writes."""


@dataclass(slots=True)
class Findings:
    """Results for code and data.

    Attributes:
        problems: each with its config key. With any, the run cannot start.
        rows: label and text of lines for the plan: notes, and arguments of rewards that keep their defaults.
        row_count: rows of the training data; 0 if it cannot be read.
        records: fingerprints of the data sets.
        modules: the user's own modules that were imported, each with its file.
    """

    problems: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    row_count: int = 0
    records: list[Provenance] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
