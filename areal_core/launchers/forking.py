"""The launcher's end of the fork server: started early, asked for members, and started again if it was killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.background import start_thread
from areal_core.errors import RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.launchers.fork_server import ONE_THREAD
from areal_core.launchers.guard import kill_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END_S = 20.0
ANSWER_S = 300.0
"""For imports on a slow disk, and for a member before, which a device holds, to be gone."""
Answer = TypeVar("Answer")


class ForkServer:
    """A running fork server. Its environment is this program's, with one thread for every library."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_core.launchers.fork_server"],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._ready: Future[int] = Future()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Forked]] = {}
        self._ended: dict[int, Future[int]] = {}
        start_thread(self._on_message, "answers of the fork server")

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    async def threads(self) -> int:
        """How many it has once everything is imported: with more than one, nothing is forked."""
        return await self._answer(self._ready, "imported what members need")

    async def fork(self, argv: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Fork a member that runs `python -m argv`.

        Raises:
            RunError: the server has ended, or cannot fork.
        """
        number, asked = next(self._numbers), Future[Forked]()
        self._asked[number] = asked
        assert self._process.stdin is not None
        try:
            order = {"number": number, "argv": list(argv), "environment": dict(environment)}
            self._process.stdin.write(f"{json.dumps(order)}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RunError(f"the fork server is gone: {error}") from None
        return await self._answer(asked, f"forked {argv[0]}")

    async def _answer(self, future: Future[Answer], what: str) -> Answer:
        try:
            # Shielded: the thread that hears the server sets the answer also when nobody waits for it any more.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), ANSWER_S)
        except TimeoutError:
            hints = ["without it: launcher.fork_server=false"]
            raise RunError(f"the fork server has not {what} within {ANSWER_S:g} s", hints=hints) from None

    def close(self) -> None:
        """End it and everything that it has forked; safe to call twice."""
        assert self._process.stdin is not None
        if not self._ready.done():  # it still imports, and has forked nothing
            self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()

    def _on_message(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "threads" in told:
                self._ready.set_result(told["threads"])
            elif "ended" in told:
                self._ended.pop(told["ended"]).set_result(told["code"])
            elif "failed" in told:
                self._asked.pop(told["number"]).set_exception(RunError(f"no member can be forked: {told['failed']}"))
            else:
                pid, ended = told["pid"], Future[int]()
                self._ended[pid] = ended  # told of before its end
                self._asked.pop(told["number"]).set_result(Forked(pid, ended))
        how = f"the fork server {describe_exit(self._process.wait())}"
        waits: list[Future[Any]] = [self._ready, *self._asked.values(), *self._ended.values()]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(RunError(how))


class Forked:
    """A member that was forked."""

    def __init__(self, pid: int, ended: Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        if not self._ended.done():
            return None
        return -1 if self._ended.exception() is not None else self._ended.result()

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._ended))
        except RunError:
            return -1
