"""References to trajectories, which processes exchange instead of the trajectories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """The place of a prompt group's trajectories in a segment.

    Attributes:
        segment: path of the segment, relative to the run folder.
        offset: offset of the first byte.
        size: number of bytes.
        digest: digest of these bytes.
    """

    segment: str
    offset: int
    size: int
    digest: str
