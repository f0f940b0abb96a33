"""Serve a web application until the process that started this one closes standard input."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from typing import Any

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than areal keeps one, so that no request meets a closing one."""


def listen() -> socket.socket:
    """Return a socket that listens on a free port of this machine."""
    return socket.create_server(("127.0.0.1", 0), backlog=2048)


def serve(app: Any, listening: socket.socket, output: Any) -> None:
    """Write the address to `output`, serve, and end this process when standard input is closed."""
    asyncio.run(_serve(app, listening, output))


async def _serve(app: Any, listening: socket.socket, output: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    output.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    output.flush()
    closed = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await asyncio.wait({serving})
    # After a signal or a failure, a thread still reads standard input: only this ends the process.
    if serving.exception() is None:
        os._exit(0)
    traceback.print_exception(serving.exception())
    sys.stderr.flush()
    os._exit(1)
