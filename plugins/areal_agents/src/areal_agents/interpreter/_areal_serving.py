"""Serve until the process that started this one closes standard input."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than areal keeps one, so that no request meets a closing one."""


def listen() -> socket.socket:
    """Return a socket that listens on a free port of this machine."""
    return socket.create_server(("127.0.0.1", 0), backlog=2048)


def serve(app: Any, listening: socket.socket, output: Any) -> None:
    """Serve a web application until standard input is closed or serving fails, and end this process."""
    asyncio.run(_serve(app, listening, output))


async def serve_until_closed(
    work: Coroutine[Any, Any, Any], address: str, output: Any, stop: Callable[[], object] | None = None
) -> None:
    """Write the address, and serve until standard input is closed or serving fails. Then end this process.

    Args:
        work: serves.
        address: address at which it does.
        output: file to write the address to.
        stop: asks the work to end; None: it is cancelled.
    """
    serving = asyncio.ensure_future(work)
    output.write(f"{address}\n")
    output.flush()
    closed = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
    (stop or serving.cancel)()
    await asyncio.wait({serving})
    # A thread may still read standard input: only this ends the process.
    if serving.cancelled() or serving.exception() is None:
        os._exit(0)
    traceback.print_exception(serving.exception())
    sys.stderr.flush()
    os._exit(1)


async def _serve(app: Any, listening: socket.socket, output: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    await serve_until_closed(server.serve(sockets=[listening]), address, output, stop)
