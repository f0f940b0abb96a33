"""Whether all nodes see the run's folder as the supervisor does: each reads what the other has written there.

Network file systems may show for a minute what a folder held before, so a node is given more than that.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import Done, TryFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.messages import Channel

STALE_S = 70.0
"""NFS keeps a file's attributes for up to 60 s."""
POLL_S = 0.1
LOOKS_PER_S = 200.0
"""At the file system for the answers of all nodes together, which may be thousands."""


async def who_cannot_see(folder: Path, nodes: Mapping[str, Channel]) -> dict[str, str]:
    """The nodes that do not see a folder as this program does, by name, each with the reason.

    Raises:
        RunError: this program itself cannot write there.
    """
    tried, word = folder / f".nodes-{secrets.token_hex(4)}", secrets.token_hex(8)
    pause = max(POLL_S, len(nodes) / LOOKS_PER_S)
    try:
        tried.mkdir()
        (tried / "supervisor").write_text(word)
        found = await asyncio.gather(*(_problem_of(channel, tried, word, pause) for channel in nodes.values()))
    except OSError as error:
        raise RunError(f"the run's folder {folder} cannot be written: {error.strerror}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, tried, ignore_errors=True)
    return {name: problem for name, problem in zip(nodes, found, strict=True) if problem}


async def _problem_of(channel: Channel, tried: Path, word: str, pause: float) -> str:
    """Why a node cannot work there; empty where it can."""
    asked = TryFolder(str(tried), word, f"node-{secrets.token_hex(4)}")
    try:
        await channel.request(asked, STALE_S + 10, "a look at the run's folder")
    except RunError as error:
        return error.message
    deadline = time.monotonic() + STALE_S
    while not (tried / asked.answer).is_file():
        if time.monotonic() > deadline:
            return f"what it writes into {tried.parent} is not seen here: all nodes must see the same folder"
        await asyncio.sleep(pause)
    return ""


def answer(asked: TryFolder) -> Any:
    """A node's side: read what the supervisor has written, and write the same; waits while it may be stale."""
    folder, deadline = Path(asked.folder), time.monotonic() + STALE_S
    while True:
        try:
            problem = "its files are another folder's"
            if (folder / "supervisor").read_text() == asked.word:
                (folder / asked.answer).write_text(asked.word)
                return Done()
        except OSError as error:
            problem = error.strerror or repr(error)
        if time.monotonic() > deadline:
            return Failed(f"it does not see the run's folder {folder.parent}: {problem}")
        time.sleep(POLL_S)
