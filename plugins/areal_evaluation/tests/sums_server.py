"""A small server that speaks OpenAI's chat completions, and misbehaves where a message asks it to; a program.

It adds the numbers in the last message of the user's. It says its port and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

from aiohttp import web

KEY = "Bearer right"
FOREVER_S = 10_000.0


def answer(body: dict[str, Any], text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": len(text), "total_tokens": 7 + len(text)}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if request.headers.get("Authorization") != KEY:
        return web.json_response({"error": {"message": "this key is wrong"}}, status=401)
    asked = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
    if "500" in asked:
        return web.json_response({"error": {"message": "out of <order>"}}, status=500)
    if "elsewhere" in asked:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/v1")
    if "nonsense" in asked:
        return web.Response(text="<html>welcome</html>", content_type="text/html")
    if "other json" in asked:
        return web.json_response({"detail": ["no"]})
    if "surrogate" in asked:
        return web.json_response(answer(body, "half of a sign: \ud83d", []))
    if "hang" in asked:
        await asyncio.sleep(FOREVER_S)
    if "temperature" in asked:
        return web.json_response(answer(body, f"{body['model']} {body.get('temperature')}", []))
    if "tool" in asked and body["messages"][-1]["role"] != "tool":
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        return web.json_response(answer(body, "<b>I call & wait</b>", [call]))
    if "halves of a sign" in asked:
        told = answer(body, "\ud83d\ude00", [])
    else:
        told = answer(body, str(sum(map(int, re.findall(r"\d+", asked)))), [])
    if not body.get("stream"):
        return web.json_response(told)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for letter in told["choices"][0]["message"]["content"]:
        choice = {"index": 0, "delta": {"content": letter}, "finish_reason": None}
        await response.write(f"data: {json.dumps({**told, 'choices': [choice], 'usage': None})}\n\n".encode())
        if "break off" in asked:
            request.transport.abort()
            return response
    last = {**told, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
    return response


async def models(request: web.Request) -> web.Response:
    is_known = request.headers.get("Authorization") == KEY
    return web.json_response({"data": []} if is_known else {"error": "wrong key"}, status=200 if is_known else 401)


async def main() -> None:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
