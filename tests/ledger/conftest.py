"""What the ledger's tests write down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.segments import SegmentWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _written(ledger: Path, numbers: list[int]) -> list[PromptGroup]:
    """Groups whose trajectories, here some bytes, a worker has written into a segment of the ledger's attempt."""
    writer = SegmentWriter(ledger.parent / "segments", ledger.parents[2], f"worker-of-{numbers}", print)

    async def write() -> list[PromptGroup]:
        records = await asyncio.gather(*(writer.write(f"group {number}".encode()) for number in numbers))
        return [PromptGroup(n, (n, 0), record, 0) for n, record in zip(numbers, records, strict=True)]

    return asyncio.run(write())


@pytest.fixture
def written() -> Callable[[Path, list[int]], list[PromptGroup]]:
    """Writes groups of an attempt, whose ledger is in a folder, into one segment."""
    return _written
