"""Peers in event loops, threads and processes: what arrives is what was sent, or an error that says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from areal_core.background import on_failure
from areal_core.errors import RunError
from areal_core.messages.scores import ScoreFailed
from areal_core.runtime import frames, rpc
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.rpc import (
    Credentials,
    Failed,
    FrameDecoder,
    Hello,
    LoopThread,
    PeerClosed,
    PeerCorrupt,
    PeerRefused,
    adopt,
    connect,
    connect_blocking,
    encode_frame,
    private_folder,
    serve,
)
from tests.runtime.parcels import Small, parcel

HANG_S = 60
"""Nothing here takes a second; what takes a minute hangs."""


async def echo(channel):
    while True:
        channel.notify(await channel.receive())


async def send_much(channel):
    channel.notify(parcel(1, bytes(1 << 24)))
    await asyncio.sleep(0.05)  # the socket's buffer is full
    is_sending = channel.is_sending
    await channel.receive()  # by now it was read
    channel.notify(Small(f"{is_sending} {channel.is_sending}"))


def run(scenario, handler=echo, credentials=None, address=None):
    async def body():
        with private_folder() as folder:
            place, shown = address or f"unix:{folder / 'socket'}", credentials and (lambda: credentials)
            server = await serve(place, handler, shown)
            try:
                return await asyncio.wait_for(scenario(server.address), HANG_S)
            finally:
                server.close()

    return asyncio.run(body())


def test_messages_come_back_equal_and_in_order():
    async def scenario(address):
        channel = await connect(address, 5)
        sent = [parcel(i, bytes([i % 256]) * i) for i in range(500)]
        for each in sent:
            channel.notify(each)
        assert [await channel.receive() for _ in sent] == sent
        await channel.close()

    run(scenario)


@pytest.mark.slow
def test_a_payload_of_hundreds_of_megabytes_passes():
    payload = os.urandom(1 << 20) * 150

    async def scenario(address):
        channel = await connect(address, 5)
        channel.notify(parcel(1, payload))
        channel.notify(Small("behind"))
        assert (await channel.receive()).content == payload
        assert await channel.receive() == Small("behind")

    run(scenario)


def test_messages_of_one_turn_of_the_loop_are_one_write():
    async def scenario(address):
        channel = await connect(address, 5)
        await asyncio.sleep(0)
        writes = []
        write = channel._transport.writelines
        channel._transport.writelines = lambda pieces: (writes.append(len(pieces)), write(pieces))
        for i in range(1000):
            channel.notify(Small(str(i)))
        assert not writes
        await channel.receive()
        assert writes == [1000]

    run(scenario)


def test_a_request_has_its_reply_whatever_the_order():
    async def answer(channel):
        first, second = [await channel.receive_request() for _ in range(2)]
        for asked, number in (second, first):
            channel.reply(number, Small(f"answer to {asked.text}"))
        await channel.receive()

    async def scenario(address):
        channel = await connect(address, 5)
        both = [channel.request(Small(word), HANG_S, "an answer") for word in ("one", "two")]
        assert await asyncio.gather(*both) == [Small("answer to one"), Small("answer to two")]

    run(scenario, answer)


def test_a_request_that_fails_is_not_answered_or_loses_its_peer():
    async def answer(channel):
        channel.reply((await channel.receive_request())[1], Failed("no such thing", ("look elsewhere",)))
        await channel.receive()  # not answered
        await channel.receive()  # the peer ends in the middle of this one

    async def scenario(address):
        channel = await connect(address, 5)
        with pytest.raises(RunError, match="no such thing") as caught:
            await channel.request(Small(), HANG_S, "an answer")
        assert caught.value.hints == ("look elsewhere",)
        with pytest.raises(RunError, match=r"no answer within 0\.1 s: waited for an answer"):
            await channel.request(Small(), 0.1, "an answer")
        with pytest.raises(PeerClosed):
            await channel.request(Small(), HANG_S, "an answer")

    run(scenario, answer)


def test_the_folder_is_private_and_goes_away():
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder / "socket")) < 108
    assert not folder.exists()


def test_nobody_listening_is_a_timeout(tmp_path):
    with pytest.raises(TimeoutError, match="nothing listens"):
        asyncio.run(connect(f"unix:{tmp_path / 'socket'}", 0.1))
    with pytest.raises(FileNotFoundError):
        connect_blocking(f"unix:{tmp_path / 'socket'}", 0.1)


def test_a_host_that_does_not_answer_is_a_timeout() -> None:
    """The kernel drops connections that come while the queue of a socket is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = f"tcp:127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="nothing listens"):
            asyncio.run(asyncio.wait_for(connect(address, 0.1, credentials=Credentials("right", 3)), HANG_S))


@pytest.mark.parametrize(
    "shown",
    [Credentials("wrong", 3), Credentials("ü", 3), Credentials("right", 2), Credentials("", 0)],
    ids=["token", "unicode", "attempt", "none"],
)
def test_whoever_shows_other_credentials_is_not_let_in(shown):
    served = []

    async def handler(channel):
        served.append(channel.name)
        await echo(channel)

    async def scenario(address):
        channel = await connect(address, 5, "stranger", shown)
        channel.notify(Small("hello?"))
        with pytest.raises(PeerRefused, match=r"another run's|attempt 2 of the run is over"):
            await channel.request(Small("hello?"), HANG_S, "an answer")
        with pytest.raises(PeerRefused, match=r"another run's|attempt 2 of the run is over"):
            await channel.receive()
        friend = await connect(address, 5, "friend", Credentials("right", 3))
        friend.notify(Small("hello"))
        assert await friend.receive() == Small("hello")

    run(scenario, handler, Credentials("right", 3), "tcp:127.0.0.1:0")
    assert served == ["friend"]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello("token", 2, "trainer-0"), ""),
        (Hello("token", 1, "trainer-0"), "attempt 1 of the run is over: it is in attempt 2"),
        (Hello("token", 1, "guard"), ""),
        (Hello("token", 3, "guard"), "attempt 3 of the run"),
        (Hello("other", 2, "guard"), "the token is another run's"),
    ],
)
def test_a_peer_of_an_older_attempt_is_refused_unless_it_is_a_guard(hello, reason):
    refusal = Credentials("token", 2).refusal(hello)
    assert refusal.startswith(reason)
    assert bool(refusal) is bool(reason)


def test_tcp_is_served_only_behind_a_token():
    with pytest.raises(ValueError, match="behind a token"):
        run(None, credentials=Credentials(), address="tcp:127.0.0.1:0")


CHILD = """
import sys, time
from areal_core.runtime import frames, rpc
from areal_core.runtime.rpc import connect_blocking
from areal_core.messages.scores import ScoreFailed
connection = connect_blocking(sys.argv[1], 60)
frames.send(connection, ScoreFailed(0, "last words"))
time.sleep(600)
"""


def test_a_killed_peer_is_noticed_and_its_last_words_are_heard():
    heard = []

    async def handler(channel):
        said = await channel.receive()
        assert isinstance(said, ScoreFailed)
        heard.append(said.error)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerClosed):
            await channel.receive()
        with pytest.raises(PeerClosed):
            channel.notify(Small("hello"))
        heard.append("closed")

    async def scenario(address):
        nonlocal process
        process = subprocess.Popen([sys.executable, "-c", CHILD, address])
        while len(heard) < 2:
            await asyncio.sleep(0.01)

    process: Any = None
    run(scenario, handler)
    process.wait()
    assert heard == ["last words", "closed"]


def test_a_peer_that_has_just_reset_its_connection_may_be_hung_up_on():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            other = socket.create_connection(listening.getsockname())
            channel = await adopt(listening.accept()[0])
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        other.close()
        channel.end()  # in the same turn: the event loop has not heard of it yet
        async with asyncio.timeout(HANG_S):
            with pytest.raises(PeerClosed):
                await channel.receive()

    asyncio.run(scenario())


def test_a_waiting_receiver_may_be_cancelled():
    async def scenario(address):
        channel = await connect(address, 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.05)
        channel.notify(Small("still works"))
        assert await channel.receive() == Small("still works")

    run(scenario)


def test_who_has_not_said_hello_cannot_announce_gigabytes(monkeypatch):
    """And so cannot fill the memory of a run whose token it does not know."""
    monkeypatch.setattr(rpc, "HELLO_TIMEOUT_S", 10 * HANG_S)  # it is not lateness that closes the channel
    too_large = b"ARL3" + (1 << 30).to_bytes(4, "little")
    with pytest.raises(PeerCorrupt):
        FrameDecoder(largest_first=1 << 16).feed(too_large)
    decoder = FrameDecoder(largest_first=1 << 16)
    assert decoder.feed(bytes(encode_frame(Small()))) != []
    assert decoder.feed(too_large) == [], "whoever has said hello may"

    async def scenario(address):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write(too_large)
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_connection_without_a_hello_is_closed(monkeypatch):
    monkeypatch.setattr(rpc, "HELLO_TIMEOUT_S", 0.1)

    async def scenario(address):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_handler_that_raises_a_timeout_fails_as_with_any_other_error():
    failures: list[BaseException] = []
    former = on_failure(lambda _, error: failures.append(error))

    async def handler(channel):
        raise TimeoutError("of the handler")

    async def scenario(address):
        channel = await connect(address, 5)
        with pytest.raises(PeerClosed):
            await channel.receive()

    try:
        run(scenario, handler)
    finally:
        on_failure(former)
    assert [str(error) for error in failures] == ["of the handler"]


def keepalive_of(connection):
    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
    is_on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [bool(is_on), *(connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)]


@pytest.mark.parametrize("runner", [asyncio.run, run_event_loop], ids=["asyncio", "uvloop"])
def test_the_kernel_watches_the_host_at_the_other_end_of_a_tcp_connection(runner):
    credentials = Credentials("right", 3)
    settings = []

    async def handler(channel):
        settings.append(keepalive_of(channel._transport.get_extra_info("socket")))

    async def body():
        server = await serve("tcp:127.0.0.1:0", handler, lambda: credentials)
        channel = await connect(server.address, HANG_S, credentials=credentials)
        settings.append(keepalive_of(channel._transport.get_extra_info("socket")))
        with pytest.raises(PeerClosed):
            await channel.receive()
        blocking = connect_blocking(server.address, HANG_S, credentials=credentials)
        settings.append(keepalive_of(blocking))
        blocking.close()
        server.close()

    runner(body())
    assert settings[:3] == [[True, 10, 5, 4, 90_000]] * 3


def test_garbage_closes_the_channel(monkeypatch):
    monkeypatch.setattr(rpc, "HELLO_TIMEOUT_S", 10 * HANG_S)  # it is not lateness that closes the channel
    seen = []

    async def handler(channel):
        seen.append("let in")

    async def scenario(address):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert await reader.read() == b""
        writer.close()

    run(scenario, handler)
    assert seen == []


def test_a_thread_without_an_event_loop():
    outcome: list[Any] = []

    def client(address):
        thread = LoopThread("test")
        channel = thread.call(connect(address, HANG_S))
        outcome.append(thread.call(channel.request(parcel(1, b"x" * 3_000_000), HANG_S, "an echo")))
        with pytest.raises(PeerClosed):
            thread.start(channel.request(Small("question"), None, "an answer")).result(HANG_S)
        thread.call(channel.close())

    async def handler(channel):
        message, number = await channel.receive_request()
        channel.reply(number, message)
        await channel.receive()

    async def scenario(address):
        thread = threading.Thread(target=client, args=(address,))
        thread.start()
        await asyncio.to_thread(thread.join)

    run(scenario, handler)
    assert outcome == [parcel(1, b"x" * 3_000_000)]


def test_what_has_not_left_yet_is_known():
    async def scenario(address):
        def read():
            connection = connect_blocking(address, HANG_S)
            time.sleep(0.2)
            assert len(frames.receive(connection).message.content) == 1 << 24
            frames.send(connection, Small())
            return frames.receive(connection).message.text

        assert await asyncio.to_thread(read) == "True False"

    run(scenario, send_much)


def test_closing_a_thread_cancels_what_it_runs_and_ends_it():
    thread, cancelled = LoopThread("closed"), []

    async def wait_forever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    thread.start(wait_forever())
    thread.call(asyncio.sleep(0))
    thread.close()
    assert cancelled == [True]
    assert thread.loop.is_closed()
    assert "closed" not in {each.name for each in threading.enumerate()}
    thread.close()
