"""The generating process of an engine that belongs to no run."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


async def spawn(address: str, log: Path, threads: int) -> asyncio.subprocess.Process:
    """Start it; it ends when its connection does.

    Args:
        address: at which the engine waits for it.
        log: what it writes.
        threads: that it computes with.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal_hf", address),
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
