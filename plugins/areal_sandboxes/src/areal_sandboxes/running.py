"""Watching one process with everything that it prints, until it ends or one of its limits ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import IO

from areal_core.errors import RunError

GATE = ("/bin/sh", "-c", 'echo && read -r _ && exec "$@"', "sh")
"""In front of a command that begins only if somebody watches it who was told that it could: it does not outlive anybody
who is killed while it is started."""
CHUNK = 1 << 16
KILLED_S = 10.0
"""For the kernel to end a process that was killed."""


class Watched:
    """A process that was started in a session of its own, with pipes for its output.

    Args:
        process: of which nobody else reads or waits.
        most_bytes: of its output, and of its error output. One that writes more is ended.
        given: what is written to its standard input, a pipe: whoever has read it has taken it from all others.
        is_gated: whether it begins with `GATE`: it says one line more before, and is given one more.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], most_bytes: int, given: bytes, *, is_gated: bool = False
    ) -> None:
        self._process = process
        self._most_bytes = most_bytes
        self._given = memoryview(b"\n" + given if is_gated else given)
        self._is_gated = is_gated
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self._loop.create_future()
        assert process.stdout is not None
        assert process.stderr is not None
        self._written: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}

    @property
    def output(self) -> str:
        """What it wrote, up to the limit; what is no UTF-8 is replaced."""
        return self._text(self._process.stdout)

    @property
    def error(self) -> str:
        """The same of its error output."""
        return self._text(self._process.stderr)

    async def end(self, time_s: float) -> str:
        """Wait for its end; which limit ended it, or nothing. Its group has ended when this returns or raises."""
        descriptor = os.pidfd_open(self._process.pid)
        try:
            self._loop.add_reader(descriptor, self._ended, "")
            for stream in self._written:
                os.set_blocking(stream.fileno(), False)
                self._loop.add_reader(stream.fileno(), self._read, stream)
            if not self._is_gated:
                self._begin_writing()
            with suppress(TimeoutError):
                async with asyncio.timeout(time_s):
                    return await self._over
            return "time"
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            for stream in self._written:
                self._loop.remove_reader(stream.fileno())
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._stop_writing(self._process.stdin)
            self.kill()
            self._wait()

    def _wait(self) -> None:
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"process {self._process.pid} was killed and has not ended within {KILLED_S:g} s") from error

    def kill(self) -> None:
        """End its group; only while nobody has waited for the process, whose number is its own until then."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def drain(self) -> bool:
        """Take what is left in the pipes and close them; whether all of it is within the limit."""
        for stream in self._written:
            while self._take(stream) and not self._is_full(stream):
                pass
            stream.close()
        return not any(self._is_full(stream) for stream in self._written)

    def _read(self, stream: IO[bytes]) -> None:
        if self._take(stream) is False:
            self._loop.remove_reader(stream.fileno())
        if self._is_full(stream):
            self._ended("output")

    def _begin_writing(self) -> None:
        stream = self._process.stdin
        if stream is not None and not stream.closed:
            os.set_blocking(stream.fileno(), False)
            self._loop.add_writer(stream.fileno(), self._write, stream)

    def _write(self, stream: IO[bytes]) -> None:
        try:
            self._given = self._given[os.write(stream.fileno(), self._given[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # nobody reads it any more
            self._given = self._given[:0]
        if not self._given:
            self._stop_writing(stream)

    def _stop_writing(self, stream: IO[bytes]) -> None:
        self._loop.remove_writer(stream.fileno())
        stream.close()

    def _take(self, stream: IO[bytes]) -> bool | None:
        """Whether there was something; None where nothing is there yet."""
        try:
            data = os.read(stream.fileno(), CHUNK)
        except BlockingIOError:
            return None
        if self._is_gated and data and stream is self._process.stdout:
            self._is_gated = False
            self._begin_writing()
            self._written[stream] += data[1:]
        else:
            self._written[stream] += data
        return bool(data)

    def _is_full(self, stream: IO[bytes]) -> bool:
        return len(self._written[stream]) > self._most_bytes

    def _ended(self, limit: str) -> None:
        if not self._over.done():
            self._over.set_result(limit)

    def _text(self, stream: IO[bytes] | None) -> str:
        assert stream is not None
        return self._written[stream][: self._most_bytes].decode("utf-8", "replace")
