"""Waits of tests. Imported by path; see conftest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


async def until_requested(requests: Sequence[tuple[str, Any]], name: str) -> None:
    """Return when a server has got a request of this name. It appends `(name, content)` for each request."""
    while not any(requested == name for requested, _ in requests):
        await asyncio.sleep(0.01)
