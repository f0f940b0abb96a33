"""An MCP server, as a user has one: it remembers, fails, waits and dies. `--deaf` goes on when its input ends."""

from __future__ import annotations

import os
import sys
import time

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> str:
    """Writes something down.

    Args:
        text: what.
        times: how often.
    """
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool()
def variable(wanted: str) -> str:
    """Of its environment."""
    return os.environ.get(wanted, "unknown")


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def fail() -> str:
    """Fails."""
    raise LookupError("nothing is found")


@server.tool()
async def sleep(seconds: float) -> str:
    """Waits."""
    await anyio.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    if "--mute" in sys.argv:
        time.sleep(600)
    if "--http" in sys.argv:
        server.run(transport="streamable-http", port=int(sys.argv[sys.argv.index("--http") + 1]))
    server.run()
    while "--deaf" in sys.argv:
        time.sleep(1)
