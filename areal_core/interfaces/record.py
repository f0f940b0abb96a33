"""References to trajectories, which travel in their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """Where the trajectories of a prompt group lie.

    Attributes:
        segment: the file, relative to the run folder.
        offset: of the first byte.
        size: bytes.
        digest: of these bytes.
    """

    segment: str
    offset: int
    size: int
    digest: str
