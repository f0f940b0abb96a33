"""The contract of `areal_core.inference.http_client`: what a call returns or raises, whatever the server does.

Most tests use aiohttp's server. Those of single sockets write the bytes of their answers themselves.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_core.inference import http_client
from areal_core.inference.errors import RequestRefusedError
from areal_core.inference.http_client import ServerConnection, raise_refusal
from areal_core.runtime.network import free_port
from areal_core.servers import ServerLostError, ServerUnreachableError

SECRET = [31337, 31338, 31339]


def serving(handle, use, **settings):
    """What `use(connection)` gives while `handle(request)` answers everything."""

    async def run():
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{rest:.*}", handle)
        async with TestServer(application) as server:
            connection = ServerConnection(str(server.make_url("")).rstrip("/"), **{"timeout_s": 5.0, **settings})
            try:
                return await use(connection)
            finally:
                connection.close()

    return asyncio.run(run())


def streamed(*lines, end="", pause=0.0):
    async def handle(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(line.encode())
            await asyncio.sleep(pause)
        if end == "cut":
            request.transport.abort()
        elif end == "silence":
            await asyncio.sleep(30)
        return response

    return handle


async def collected(connection, into=None):
    found = [] if into is None else into
    async for value in connection.post_for_events("/generate", {"input_ids": SECRET}):
        found.append(value)
    return found


def answering(status, text="", **settings):
    async def handle(request):
        return web.Response(status=status, text=text, **settings)

    return handle


def post(connection):
    return connection.post("/generate", {"input_ids": SECRET})


def test_values_and_empty_answers():
    assert serving(answering(200, '{"a": [1]}'), lambda c: c.get("/x")) == {"a": [1]}
    assert serving(answering(200, ""), post) is None
    assert serving(answering(200, " \n"), post) is None


def test_the_body_the_query_and_the_key_arrive():
    seen = []

    async def handle(request):
        seen.append((request.method, request.path_qs, await request.json(), request.headers.get("Authorization")))
        return web.Response(text="{}")

    serving(handle, lambda c: c.post("/x", {"a": 1}, query={"mode": "keep"}), api_key="swordfish")
    assert seen == [("POST", "/x?mode=keep", {"a": 1}, "Bearer swordfish")]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 499])
def test_a_refusal_is_about_the_request(status):
    with pytest.raises(RequestRefusedError, match=rf"/generate was refused \({status}\): too long"):
        serving(answering(status, '{"error": {"message": "too long"}}'), post)
    with pytest.raises(RequestRefusedError, match="too long"):
        serving(answering(status, '{"error": {"message": "too long"}}'), collected)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_other_errors_are_about_the_server(status):
    with pytest.raises(ServerLostError, match=rf"/generate failed \({status}\): not now"):
        serving(answering(status, '{"detail": "not now"}'), post)
    with pytest.raises(ServerLostError, match="not now"):
        serving(answering(status, '{"detail": "not now"}'), collected)


@pytest.mark.parametrize("text", ["<html>", "{", "nul", '{"a": 1}{', "\udcff".encode("utf-8", "surrogateescape")])
def test_garbage(text):
    settings = {"body": text} if isinstance(text, bytes) else {"text": text}

    async def handle(request):
        return web.Response(**settings)

    with pytest.raises(ServerLostError, match="something that is not JSON"):
        serving(handle, post)


def test_garbage_in_a_stream_after_good_values():
    found = []
    with pytest.raises(ServerLostError, match="something that is not JSON"):
        serving(streamed('data: {"a": 1}\n\n', "data: {oops\n\n"), lambda c: collected(c, found))
    assert found == [{"a": 1}], "what came before is kept"


def test_a_stream():
    lines = [": a comment\n\n", 'data: {"a": 1}\n\n', 'data:{"a"', ": 2}\r\n\r\n", "event: x\n\n", "data: [DONE]\n\n"]
    assert serving(streamed(*lines), collected) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("end", ["", "cut"])
def test_a_stream_that_ends_too_early(end):
    found = []
    with pytest.raises(ServerLostError, match="/generate"):
        serving(
            streamed('data: {"a": 1}\n\n', 'data: {"a": 2}\n\n', end=end, pause=0.05), lambda c: collected(c, found)
        )
    assert found == [{"a": 1}, {"a": 2}]


def test_a_very_long_event():
    event = json.dumps({"ids": list(range(200_000))})
    (found,) = serving(streamed(f"data: {event}\n\n", "data: [DONE]\n\n"), collected)
    assert len(found["ids"]) == 200_000


def test_a_call_has_a_deadline():
    async def handle(request):
        await asyncio.sleep(30)

    began = time.monotonic()
    with pytest.raises(ServerLostError, match="/health was not answered in time"):
        serving(handle, lambda c: c.get("/health", 0.2))
    with pytest.raises(ServerLostError, match="not answered in time"):
        serving(handle, post, timeout_s=0.2)
    assert time.monotonic() - began < 5


def test_silence_ends_a_stream_and_slowness_does_not():
    slow = ['data: {"a": 1}\n\n'] * 8 + ["data: [DONE]\n\n"]
    assert len(serving(streamed(*slow, pause=0.15), collected, timeout_s=0.6)) == 8, "it took longer than the time-out"
    found = []
    with pytest.raises(ServerLostError, match="not answered in time"):
        serving(streamed('data: {"a": 1}\n\n', end="silence"), lambda c: collected(c, found), timeout_s=0.3)
    assert len(found) == 1


def test_nobody_there():
    async def call():
        connection = ServerConnection(f"http://127.0.0.1:{free_port()}")
        try:
            await connection.get("/health", 5)
        finally:
            connection.close()

    with pytest.raises(ServerUnreachableError, match="Connect"):
        asyncio.run(call())


@pytest.mark.parametrize(
    "address", ["localhost:1", "nonsense", "http://", "ftp://127.0.0.1:1", "http://no-such-host.invalid:1"]
)
def test_addresses_that_are_none(address):
    async def call():
        connection = ServerConnection(address)
        try:
            await connection.get("/health", 5)
        finally:
            connection.close()

    with pytest.raises(ServerLostError):
        asyncio.run(call())


@pytest.mark.parametrize(
    "said",
    [
        json.dumps({"detail": [{"type": "int", "loc": ["body"], "msg": "wrong type", "input": SECRET}]}),
        json.dumps({"error": {"message": f"1 validation error\n 'input': {SECRET}"}}),
        json.dumps({"message": f"wrong type {{'type': 'x', 'input': {SECRET}}}"}),
        f"wrong type, {{'input': {SECRET}}}",
        json.dumps({"detail": {"msg": "wrong type", "input": SECRET}}),
    ],
)
@pytest.mark.parametrize("status", [400, 500])
def test_errors_hold_no_payload(said, status):
    with pytest.raises((RequestRefusedError, ServerLostError)) as caught:
        serving(answering(status, said), post)
    assert "31337" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_errors_are_short():
    with pytest.raises(ServerLostError) as caught:
        serving(answering(500, "a stack trace " * 10_000), post)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"code": 400, "message": "no"}, RequestRefusedError),
        ({"code": 400, "message": "no", "retryable": True}, ServerLostError),
        ({"code": 503, "message": "no"}, ServerLostError),
        ({"code": "400", "message": "no"}, RequestRefusedError),
        ({"code": "invalid_request_error", "message": "no"}, ServerLostError),
        ({"message": "no"}, ServerLostError),
    ],
)
def test_an_error_in_the_middle_of_a_stream(told, kind):
    with pytest.raises(kind, match="the answer broke off: no"):
        raise_refusal(told)


def test_closing_wakes_whoever_waits_and_the_connection_can_be_used_again():
    began = time.monotonic()

    async def handle(request):
        if request.path == "/health":
            return web.Response(text="{}")
        await asyncio.sleep(30)

    async def use(connection):
        waiting = asyncio.create_task(connection.post("/post"))
        await asyncio.sleep(0.2)
        connection.close()
        with pytest.raises(ServerLostError):
            await waiting
        assert await connection.get("/health") == {}

    serving(handle, use, timeout_s=20.0)
    assert time.monotonic() - began < 10


def test_closing_breaks_off_a_call_that_is_still_connecting(monkeypatch):
    async def handle(request):
        return web.Response(text="{}")

    async def use(connection):
        async def never(*_, **__):
            await asyncio.sleep(30)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", never)
            waiting = asyncio.create_task(connection.get("/health"))
            await asyncio.sleep(0.1)
            connection.close()
            with pytest.raises(ServerLostError, match="the connection was closed"):
                await asyncio.wait_for(waiting, 5)
            given_up = asyncio.create_task(connection.get("/health"))
            await asyncio.sleep(0.1)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        assert await connection.get("/health") == {}

    serving(handle, use, timeout_s=20.0)


def test_closing_breaks_off_a_call_on_a_connection_that_was_used_before():
    """The HTTP library tries such a call again by itself, and by then the session is closed."""

    async def handle(request):
        if request.path == "/slow":
            await asyncio.sleep(30)
        return web.Response(text="{}")

    async def use(connection):
        for _ in range(3):
            assert await connection.get("/health") == {}
            waiting = asyncio.create_task(connection.get("/slow"))
            await asyncio.sleep(0.1)
            connection.close()
            with pytest.raises(ServerLostError):
                await asyncio.wait_for(waiting, 5)
        assert await connection.get("/health") == {}

    serving(handle, use, timeout_s=20.0)


def test_a_connection_that_the_server_is_about_to_close_is_not_used_again(monkeypatch):
    """Servers close idle connections without a word, and a POST that meets the end of one is lost."""
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.05)
    answered = []

    async def serve(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(b"{}"))
                answered.append(time.monotonic())
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")  # a third request on this connection meets its end
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = ServerConnection(f"http://127.0.0.1:{port}", timeout_s=5.0)
        try:
            for pause in (0.0, 0.2, 0.0):
                await connection.post("/pause_generation")
                await asyncio.sleep(pause)
        finally:
            connection.close()
            server.close()

    asyncio.run(run())
    assert len(answered) == 3


def test_a_stream_that_is_cancelled_is_cancelled_although_all_of_it_has_come():
    async def use(connection):
        found = []
        waiting = asyncio.create_task(collected(connection, found))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert found == [{"a": 1}], "what came is told"

    serving(streamed('data: {"a": 1}\n\n', "data: [DONE]\n\n", end="silence"), use)


def over_sockets(answers, use):
    """Return what `use(connection)` gives, and how many sockets it opened.

    `answers` are the bytes of one answer after another, in pieces that are sent one by one. None closes the socket.
    """
    answers = list(answers)
    opened = 0

    async def serve(reader, writer):
        nonlocal opened
        opened += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
                for piece in answers.pop(0):
                    if piece is None:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = ServerConnection(f"http://127.0.0.1:{port}", timeout_s=5.0)
        try:
            return await use(connection)
        finally:
            connection.close()
            server.close()

    return asyncio.run(run()), opened


WHOLE = b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}'
IN_CHUNKS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'f\r\ndata: {"a": 1}\n\r\n2\r\n\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)


def byte_by_byte(answer):
    return [bytes([byte]) for byte in answer]


def test_an_answer_may_be_split_anywhere():
    assert over_sockets([byte_by_byte(WHOLE)], post) == ({"a": 1}, 1)
    assert over_sockets([byte_by_byte(IN_CHUNKS)], collected) == ([{"a": 1}], 1)


def test_calls_one_after_another_share_a_socket_and_concurrent_calls_do_not():
    async def one_after_another(connection):
        return [await post(connection) for _ in range(3)]

    async def concurrently(connection):
        return await asyncio.gather(*(post(connection) for _ in range(3)))

    assert over_sockets([[WHOLE]] * 3, one_after_another) == ([{"a": 1}] * 3, 1)
    assert over_sockets([[WHOLE]] * 3, concurrently) == ([{"a": 1}] * 3, 3)


def test_a_socket_is_not_used_again_behind_an_answer_that_says_so():
    async def twice(connection):
        return [await post(connection) for _ in range(2)]

    last = WHOLE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    assert over_sockets([[last], [WHOLE]], twice) == ([{"a": 1}] * 2, 2)


@pytest.mark.parametrize("cut", [0, 10, 30, len(WHOLE) - 1])
def test_a_socket_that_closes_within_an_answer(cut):
    with pytest.raises(ServerLostError, match="/generate the server closed the connection"):
        over_sockets([[WHOLE[:cut], None]], post)


def test_an_answer_that_is_not_http():
    with pytest.raises(ServerLostError, match="something that is not HTTP"):
        over_sockets([[b"220 mail.example ESMTP\r\n"]], post)
