"""An OpenEnv server of this file, without OpenEnv: it counts up to a goal, and misbehaves as a test wants it to."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from web_servers import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]


class SessionServer:
    """A server of sessions at /ws.

    Attributes:
        limit: most sessions at a time.
        messages: what the sessions have received.
        peak: most sessions that were open at a time.
        refused: sessions that were refused because there were `limit`.
        answer: sent instead of the answer to a step: text as it is, None for silence, "close" to close the socket.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.messages: list[dict[str, Any]] = []
        self.open = self.peak = self.refused = 0
        self.answer: str | None = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; the address."""
        application = web.Application()
        application.router.add_get("/ws", self._session)
        async with served(application) as address:
            yield address

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.limit:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            count, goal = 0, 0
            async for message in socket:
                body = json.loads(message.data)
                self.messages.append(body)
                data = body["data"]
                if body["type"] == "reset":
                    count, goal = 0, int(data.get("index", 3))
                    await socket.send_json(_observed({"text": f"count to {goal}"}))
                elif self.answer is None:
                    await asyncio.sleep(60.0)
                elif self.answer == "close":
                    await socket.close()
                elif self.answer:
                    await socket.send_str(self.answer)
                elif data.get("type") == "list_tools":
                    await socket.send_json(_observed({"tools": TOOLS}))
                elif data.get("type") == "call_tool" and data["tool_name"] != "add":
                    error = {"error_type": "tool_not_found", "message": "no such tool"}
                    await socket.send_json(_observed({"result": None, "error": error}))
                else:
                    by = data["arguments"]["by"] if "arguments" in data else int(data["message"])
                    count += by
                    result = {"content": [{"type": "text", "text": f"now {count}"}], "data": None}
                    done = count >= goal
                    reward = float(count == goal) if done else None
                    await socket.send_json(
                        _observed({"text": f"now {count}", "result": result, "error": None}, reward, done)
                    )
        finally:
            self.open -= 1
        return socket


def _observed(observation: dict[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
