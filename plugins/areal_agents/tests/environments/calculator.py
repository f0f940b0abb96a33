"""Tools, as a user writes them."""

from __future__ import annotations

import asyncio
import time


def add(a: int, b: int = 1) -> int:
    """
    Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def block(seconds: float) -> dict:
    """
    Blocks its thread.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return {"blocked": seconds}


def fail() -> str:
    """Fails."""
    raise LookupError("nothing is found")
