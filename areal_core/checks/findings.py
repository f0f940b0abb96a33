"""What the child of a preflight reports to the driver."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from areal_core.errors import ArealError, line_of
from areal_core.plugins.provenance import Provenance  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator

FINDINGS_FILE: Final = "findings.json"
"""Name of the file that the child writes."""


@dataclass(slots=True)
class Findings:
    """Results for code and data.

    Attributes:
        problems: each with its config key. With any, the run cannot start.
        rows: label and text of lines for the plan: notes, and arguments of rewards that keep their defaults.
        row_count: rows of the training data; 0 if it cannot be read.
        records: fingerprints of the data sets, and of the user's own modules that were imported.
    """

    problems: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    row_count: int = 0
    records: list[Provenance] = field(default_factory=list)


@contextmanager
def reported(key: str, problems: list[str]) -> Iterator[None]:
    """Add what a component raises to the problems, so that the child still checks the other components.

    Args:
        key: config key of the component.
        problems: gets the problem.
    """
    try:
        yield
    except ArealError as error:
        problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
    except Exception as error:  # noqa: BLE001 - the code of a component may raise anything
        problems.append(f"{key}: it cannot be built: {type(error).__name__}: {error}{line_of(error)}")
