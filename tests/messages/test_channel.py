import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from areal_core.messages.channel import (
    BlockingChannel,
    ChannelClosed,
    ChannelCorrupt,
    FrameDecoder,
    Message,
    connect,
    encode_message,
    private_socket_path,
    serve,
)


async def echo(channel):
    while True:
        await channel.send(await channel.receive())


def run(scenario, handler=echo):
    async def body():
        with private_socket_path() as path:
            server = await serve(path, handler)
            try:
                return await asyncio.wait_for(scenario(path), 30)
            finally:
                server.close()

    return asyncio.run(body())


def test_messages_come_back_equal_and_in_order():
    async def scenario(path):
        channel = await connect(path, 5)
        sent = [Message("number", {"value": i, "word": "é", "list": [1.5, None, True]}, bytes([i % 256]) * i)
                for i in range(500)]  # fmt: skip
        for message in sent:
            await channel.send(message)
        assert [await channel.receive() for _ in sent] == sent
        await channel.close()

    run(scenario)


def test_a_payload_of_hundreds_of_megabytes_passes():
    payload = os.urandom(1 << 20) * 150

    async def scenario(path):
        channel = await connect(path, 5)
        await channel.send(Message("big", {}, payload))
        await channel.send(Message("small"))
        assert (await channel.receive()).payload == payload
        assert (await channel.receive()).kind == "small"

    run(scenario)


def test_messages_of_one_turn_of_the_loop_are_one_write():
    async def scenario(path):
        channel = await connect(path, 5)
        writes = []
        write = channel._transport.write
        channel._transport.write = lambda data: (writes.append(len(data)), write(data))
        for i in range(1000):
            await channel.send(Message("small", {"i": i}))
        assert not writes
        await channel.receive()
        assert len(writes) == 1
        return [m.fields["i"] for m in channel.receive_ready()][-1:] or [0]

    assert run(scenario)[0] <= 999


def test_the_folder_is_private_and_goes_away():
    with private_socket_path() as path:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(str(path)) < 108
    assert not path.parent.exists()


def test_nobody_listening_is_a_timeout(tmp_path):
    with pytest.raises(TimeoutError, match="nobody listens"):
        asyncio.run(connect(tmp_path / "socket", 0.1))
    with pytest.raises(TimeoutError, match="nobody listens"):
        BlockingChannel(tmp_path / "socket", 0.1)


CHILD = """
import sys, time
from pathlib import Path
from areal_core.messages.channel import BlockingChannel, Message
channel = BlockingChannel(Path(sys.argv[1]), 10)
channel.send(Message("last words"))
time.sleep(60)
"""


def test_a_killed_peer_is_noticed_at_once_and_its_last_words_are_heard():
    arrived = []

    async def handler(channel):
        arrived.append((await channel.receive()).kind)
        process.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        with pytest.raises(ChannelClosed):
            await channel.send(Message("hello"))
        arrived.append(time.monotonic() - started)

    async def scenario(path):
        nonlocal process
        process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)])
        while len(arrived) < 2:
            await asyncio.sleep(0.01)

    process = None
    run(scenario, handler)
    process.wait()
    assert arrived[0] == "last words"
    assert arrived[1] < 1


def test_a_waiting_receiver_may_be_cancelled():
    async def scenario(path):
        channel = await connect(path, 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.05)
        await channel.send(Message("still", {"works": True}))
        assert (await channel.receive()).fields == {"works": True}

    run(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"ARL1" + b"\xff" * 12,
        b"ARL1" + (3).to_bytes(4, "little") + bytes(8) + b"{x}",
        b"ARL1" + (2).to_bytes(4, "little") + bytes(8) + b"{}",
        b"ARL1" + (6).to_bytes(4, "little") + bytes(8) + b'["a",]',
    ],
)
def test_garbage_is_refused(garbage):
    seen = []

    async def handler(channel):
        try:
            await channel.receive()
        except ChannelClosed as error:
            seen.append(error)

    async def scenario(path):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(garbage)
        while not seen:
            await asyncio.sleep(0.01)
        writer.close()

    run(scenario, handler)
    assert isinstance(seen[0], ChannelCorrupt)


def test_frames_may_be_cut_anywhere():
    messages = [Message("a", {"x": [1]}, b"abc"), Message("b"), Message("c", {}, b"\0" * 40)]
    stream = b"".join(encode_message(m) + m.payload for m in messages)
    for step in (1, 3, 17):
        decoder = FrameDecoder()
        found = [m for i in range(0, len(stream), step) for m, _ in decoder.feed(stream[i : i + step])]
        assert found == messages


def test_what_is_no_json_value_cannot_be_sent():
    with pytest.raises(TypeError):
        encode_message(Message("object", {"value": object()}))


def test_blocking_channel_round_trip_timeout_and_peer_death():
    outcome = []

    def client(path):
        channel = BlockingChannel(path, 5)
        channel.send(Message("one", {"a": 1}, b"x" * 3_000_000))
        outcome.append(channel.receive(5))
        try:
            channel.receive(0.1)
        except TimeoutError as error:
            outcome.append(error)
        channel.send(Message("close"))
        started = time.monotonic()
        try:
            channel.receive(10)
        except ChannelClosed:
            outcome.append(time.monotonic() - started)
        channel.close()

    async def handler(channel):
        await channel.send(await channel.receive())
        await channel.receive()

    async def scenario(path):
        thread = threading.Thread(target=client, args=(path,))
        thread.start()
        await asyncio.to_thread(thread.join)

    run(scenario, handler)
    assert outcome[0] == Message("one", {"a": 1}, b"x" * 3_000_000)
    assert isinstance(outcome[1], TimeoutError)
    assert outcome[2] < 1


def test_a_reader_that_does_not_read_slows_the_sender():
    release = threading.Event()

    async def scenario(path):
        channel = await connect(path, 5)

        async def flood():
            while True:
                await channel.send(Message("flood", {}, b"x" * 1_000_000))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 1)
        release.set()

    async def handler(channel):
        while not release.is_set():
            await asyncio.sleep(0.01)

    run(scenario, handler)
