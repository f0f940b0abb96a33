"""A pool of processes that compute rewards, so that a reward may block, hang or crash without harm.

Each worker is sent requests ahead, answers in order, and has a deadline for the one at the head. A worker that misses
it is killed and replaced; only the request at its head fails, the others go to another worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.interfaces.workflow import RewardScore
from areal_core.launchers.processes import exit_description
from areal_core.messages.channel import Channel, ChannelClosed, Message, serve
from areal_core.rewards.scoring import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REQUESTS_AHEAD = 32
START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class _Request:
    arguments: Mapping[str, Any]
    result: asyncio.Future[RewardScore]


@dataclass(slots=True, eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    channel: Channel
    sent: deque[_Request] = field(default_factory=deque)
    head_since: float = 0.0
    killed_because: str = ""


class RewardPool:
    """Scores completions in `processes` worker processes; implements `Scorer`.

    Args:
        run_dir: the run whose rewards the workers load, the same way as every process of the run.
        folder: short path for the workers' sockets.
        processes: how many workers.
        timeout_s: for one completion with all rewards of the run.
    """

    def __init__(self, run_dir: Path, folder: Path, *, processes: int, timeout_s: float) -> None:
        self._run_dir = run_dir
        self._folder = folder
        self._processes = processes
        self._timeout_s = timeout_s
        self._waiting: deque[_Request] = deque()
        self._workers: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = 0
        self._closing = False
        self._start_error: RunError | None = None

    async def start(self) -> None:
        """Start all workers and wait until they have loaded the rewards.

        Raises:
            RunError: a worker ended before it was ready; its own words are in the log.
        """
        await asyncio.gather(*(self._start_worker() for _ in range(self._processes)))
        self._spawn(self._watch_deadlines())

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """See `Scorer.score`."""
        request = _Request(arguments, asyncio.get_running_loop().create_future())
        if self._start_error is not None:
            raise self._start_error
        self._waiting.append(request)
        self._dispatch()
        return await request.result

    async def close(self) -> None:
        """End all workers; safe to call twice."""
        self._closing = True
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_worker(self) -> None:
        path = self._folder / f"reward-{self._started}.sock"
        self._started += 1
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        ended = asyncio.Event()

        async def accept(channel: Channel) -> None:
            await channel.receive()  # the worker says that its rewards are loaded
            connected.set_result(channel)
            await ended.wait()  # the server closes the channel when the handler returns

        server = await serve(path, accept)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "areal_core.rewards.worker", str(self._run_dir), str(path), str(os.getpid())
        )
        exited = asyncio.ensure_future(process.wait())
        either: set[asyncio.Future[Any]] = {connected, exited}
        try:
            await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not connected.done():
            raise RunError(
                f"a reward process ended before it was ready ({exit_description(process.returncode or 0)})",
                hints=["its own words are in logs/controller.log"],
            )
        worker = _Worker(process, connected.result())
        self._workers.append(worker)
        self._spawn(self._receive(worker, server, ended))
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand waiting requests to the workers with the fewest."""
        while self._waiting and self._workers:
            worker = min(self._workers, key=lambda w: len(w.sent))
            if len(worker.sent) >= REQUESTS_AHEAD:
                return
            request = self._waiting.popleft()
            if request.result.done():
                continue
            try:
                worker.channel.post(Message("score", {"arguments": dict(request.arguments)}))
            except (TypeError, ValueError) as error:
                request.result.set_exception(RewardError(f"the data row cannot be sent to a reward process: {error}"))
                continue
            if not worker.sent:
                worker.head_since = asyncio.get_running_loop().time()
            worker.sent.append(request)

    async def _receive(self, worker: _Worker, server: Any, ended: asyncio.Event) -> None:
        try:
            while True:
                answer = await worker.channel.receive()
                request = worker.sent.popleft()
                worker.head_since = asyncio.get_running_loop().time()
                if not request.result.done():
                    if "error" in answer.fields:
                        request.result.set_exception(RewardError(answer.fields["error"]))
                    else:
                        score = RewardScore(answer.fields["value"], answer.fields["components"])
                        request.result.set_result(score)
                self._dispatch()
        except ChannelClosed:
            ended.set()
            server.close()
            await self._replace(worker)

    async def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        code = await worker.process.wait()
        if self._closing:
            return
        if worker.sent:
            head = worker.sent.popleft()
            reason = worker.killed_because or f"the reward process died with exit code {code} while it scored this"
            if not head.result.done():
                head.result.set_exception(RewardError(reason))
            self._waiting.extendleft(reversed(worker.sent))
        try:
            await self._start_worker()
        except RunError as error:
            if not self._workers:
                self._start_error = error
                for request in self._waiting:
                    request.result.set_exception(error)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            now = asyncio.get_running_loop().time()
            for worker in self._workers:
                if worker.sent and not worker.killed_because and now - worker.head_since > self._timeout_s:
                    worker.killed_because = f"the reward took longer than rollout.reward_timeout_s: {self._timeout_s:g}"
                    with suppress(ProcessLookupError):
                        worker.process.kill()
