"""A resources server of NeMo Gym that counts in the session of a cookie, without NeMo Gym. As a program, it serves.

    PYTHON counting_server.py serve    write the address to standard output, and serve until standard input is closed

While the file `broken` is in the current folder, /verify ends the process, or stops it if the count is even.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from web_servers import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class CountingServer:
    """A resources server that counts in the session of a cookie, and misbehaves as a test wants it to.

    Attributes:
        requests: path and body of each request, except health checks.
        verify: answers /verify; it is called with the body and the count.
        is_silent: whether health checks have no answer.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.verify: Callable[[dict[str, Any], int], Awaitable[web.Response]] = self.verify_count
        self.seeded = web.json_response({}).body
        self.is_silent = False
        self._counts: dict[str, int] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; the address."""
        application = web.Application()
        application.router.add_get("/", self._health)
        application.router.add_post("/{path}", self._answer)
        async with served(application) as address:
            yield address

    async def _health(self, _: web.Request) -> web.Response:
        if self.is_silent:
            await asyncio.sleep(60.0)
        return web.Response(status=404)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.path, body))
        session = request.cookies.get("session", "")
        if request.path == "/seed_session":
            session = f"s{len(self._counts)}=="
            self._counts[session] = body["start"]
            response = web.Response(body=self.seeded, content_type="application/json")
            response.headers["Set-Cookie"] = f"session={session}; path=/"
            return response
        if request.path == "/add":
            self._counts[session] += body["by"]
            return web.Response(text=f"now {self._counts[session]}")
        if request.path == "/recite":
            return web.Response(text="a word " * 1000)
        if request.path == "/verify":
            return await self.verify(body, self._counts[session])
        return web.Response(text="out of order", status=500)

    @staticmethod
    async def verify_count(body: dict[str, Any], count: int) -> web.Response:
        numbers = {"count": count, "is_odd": count % 2 == 1, "note": "text", "missing": None, "wrong": float("nan")}
        return web.json_response({**body, "reward": float(count == body["goal"]), **numbers})


async def end(_: dict[str, Any], count: int) -> web.Response:
    """End this process, or stop it."""
    sys.stderr.write("the disk is gone\n")
    sys.stderr.flush()
    if count % 2:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError


async def main() -> None:
    """Serve until standard input is closed."""
    server = CountingServer()
    if Path("broken").exists():
        server.verify = end
    async with server.serving() as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
