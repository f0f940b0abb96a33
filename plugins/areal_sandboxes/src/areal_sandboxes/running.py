"""Run one process and collect its output until it exits or reaches a limit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import IO

from areal_core.errors import RunError

GATE = ("/bin/sh", "-c", 'echo && read -r _ && exec "$@"', "sh")
"""Shell prefix that delays a command until `Watched` answers: it prints a line and waits for one. If areal is killed
while the command is being started, nobody answers and the command never runs."""
CHUNK = 1 << 16
KILL_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to exit."""


class Watched:
    """A process that was started in a new session, with pipes for its input and output.

    Args:
        process: the process. No other code may read its output or wait for it.
        max_bytes: limit in bytes of its output, and of its error output. A process that writes more is killed.
        input_bytes: bytes for its standard input. A pipe: bytes that were read cannot be read again by the command.
        is_gated: whether its command starts with `GATE`.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], max_bytes: int, input_bytes: bytes, *, is_gated: bool = False
    ) -> None:
        self._process = process
        self._max_bytes = max_bytes
        self._unwritten = memoryview(b"\n" + input_bytes if is_gated else input_bytes)
        self._is_gated = is_gated
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.Future[str] = self._loop.create_future()
        assert process.stdout is not None
        assert process.stderr is not None
        self._outputs: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}

    @property
    def output(self) -> str:
        """Standard output up to the limit. Bytes that are not UTF-8 are replaced."""
        return self._text(self._process.stdout)

    @property
    def error(self) -> str:
        """Error output up to the limit. Bytes that are not UTF-8 are replaced."""
        return self._text(self._process.stderr)

    async def end(self, time_s: float) -> str:
        """Wait until the process exits or reaches a limit; then kill its process group.

        Args:
            time_s: time limit in seconds.

        Returns:
            "time" or "output" if it reached this limit, else an empty string.

        Raises:
            RunError: it was killed but does not exit.
        """
        descriptor = os.pidfd_open(self._process.pid)
        try:
            self._loop.add_reader(descriptor, self._finish, "")
            for stream in self._outputs:
                os.set_blocking(stream.fileno(), False)
                self._loop.add_reader(stream.fileno(), self._read, stream)
            if not self._is_gated:
                self._begin_writing()
            with suppress(TimeoutError):
                async with asyncio.timeout(time_s):
                    return await self._limit
            return "time"
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            for stream in self._outputs:
                self._loop.remove_reader(stream.fileno())
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._stop_writing(self._process.stdin)
            self.kill()
            self._wait()

    def _wait(self) -> None:
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            message = f"process {self._process.pid} was killed but did not exit within {KILL_TIMEOUT_S:g} s"
            raise RunError(message) from error

    def kill(self) -> None:
        """Kill the process group. Call this before `_wait`: afterwards the process id may belong to another process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def drain(self) -> bool:
        """Read what is left in the pipes and close them. Return whether all output is within the limit."""
        for stream in self._outputs:
            while self._take(stream) and not self._is_full(stream):
                pass
            stream.close()
        return not any(self._is_full(stream) for stream in self._outputs)

    def _read(self, stream: IO[bytes]) -> None:
        if self._take(stream) is False:
            self._loop.remove_reader(stream.fileno())
        if self._is_full(stream):
            self._finish("output")

    def _begin_writing(self) -> None:
        stream = self._process.stdin
        if stream is not None and not stream.closed:
            os.set_blocking(stream.fileno(), False)
            self._loop.add_writer(stream.fileno(), self._write, stream)

    def _write(self, stream: IO[bytes]) -> None:
        try:
            self._unwritten = self._unwritten[os.write(stream.fileno(), self._unwritten[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the process has closed its standard input
            self._unwritten = self._unwritten[:0]
        if not self._unwritten:
            self._stop_writing(stream)

    def _stop_writing(self, stream: IO[bytes]) -> None:
        self._loop.remove_writer(stream.fileno())
        stream.close()

    def _take(self, stream: IO[bytes]) -> bool | None:
        """Read a chunk. Return True if there was one, False at the end, None if nothing is there yet."""
        try:
            data = os.read(stream.fileno(), CHUNK)
        except BlockingIOError:
            return None
        if self._is_gated and data and stream is self._process.stdout:
            self._is_gated = False
            self._begin_writing()
            self._outputs[stream] += data[1:]
        else:
            self._outputs[stream] += data
        return bool(data)

    def _is_full(self, stream: IO[bytes]) -> bool:
        return len(self._outputs[stream]) > self._max_bytes

    def _finish(self, limit: str) -> None:
        if not self._limit.done():
            self._limit.set_result(limit)

    def _text(self, stream: IO[bytes] | None) -> str:
        assert stream is not None
        return self._outputs[stream][: self._max_bytes].decode("utf-8", "replace")
