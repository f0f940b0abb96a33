"""A pool of reward processes: a reward function may block, hang or crash without harm to the run.

The pool sends requests to each worker ahead of time. A worker scores its oldest request, or several concurrently if the
rewards are coroutine functions. If a request misses its deadline or the worker dies, the pool replaces the worker: its
oldest request fails, because that one is to blame if the worker scores one at a time, and its other requests go to
other workers. If the replacement cannot be started, the pool retries: the machine may be short of memory for a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.workflow import RewardScore
from areal_core.messages.scores import Score, Scored
from areal_core.rewards.child import RewardProcess
from areal_core.rewards.scoring import RewardError
from areal_core.runtime.rpc import PeerClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.runtime.folder import RunFolder

REQUESTS_AHEAD = 32
"""Requests that one worker may have."""
BLOCKED_S = 5.0
"""Seconds after a deadline until a worker that scores several requests counts as blocked: it ends late ones itself."""
START_PAUSE_S = 5.0
"""Seconds between two tries to start a replacement."""
START_PATIENCE_S = 60.0
"""Seconds of such tries after which the run ends if no other worker is left."""


@dataclass(slots=True)
class _Request:
    number: int
    arguments: Mapping[str, Any]
    result: asyncio.Future[RewardScore]
    since: float = math.inf
    """Time at which a worker started to score it."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: RewardProcess
    sent: dict[int, _Request] = field(default_factory=dict)
    killed_because: str = ""

    @property
    def in_progress(self) -> list[_Request]:
        """The requests that the worker scores now: its oldest ones."""
        return list(itertools.islice(self.sent.values(), self.process.max_concurrency))

    def start_clocks(self) -> None:
        """Start the clock of each request that is now in progress."""
        now = asyncio.get_running_loop().time()
        for request in self.in_progress:
            request.since = min(request.since, now)


@asynccontextmanager
async def open_rewards(
    config: RunConfig, run: RunFolder, log: Callable[[str], None]
) -> AsyncIterator[Callable[[Mapping[str, Any]], Awaitable[RewardScore]]]:
    """Start the reward processes of a config. Yield a function that scores an answer as a run does.

    The function takes the arguments of rewards by name, with the data row as `row`. It may be called concurrently, and
    raises an exception if a reward fails. `examples/programs/rescore.py` is a program that uses it.

    Args:
        config: config of the run.
        run: the run folder, which has the config.
        log: takes a line for the user, if a process must be restarted.

    Raises:
        RunError: the rewards cannot be loaded. The message has the end of their log.
    """
    rollout = config.rollout
    pool = RewardPool(
        run.path,
        count=rollout.reward_processes,
        timeout_s=rollout.reward_timeout_s,
        start_timeout_s=config.training.phase_timeout_s,
        log=log,
    )
    try:
        await pool.start()
        yield pool.score
    finally:
        await pool.close()


class RewardPool:
    """Scores completions in worker processes; implements `Scorer`.

    Args:
        run_dir: folder of the run whose rewards the workers load.
        count: number of workers.
        timeout_s: seconds to score one completion with all rewards of the run.
        start_timeout_s: seconds in which a worker must load the rewards.
        log: writes a line to the run's log.
        name: prefix of the workers' names; a number follows.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        count: int,
        timeout_s: float,
        start_timeout_s: float,
        log: Callable[[str], None] = lambda _: None,
        name: str = "reward",
    ) -> None:
        self._run_dir = run_dir
        self._start_timeout_s = start_timeout_s
        self._count = count
        self._timeout_s = timeout_s
        self._log = log
        self._name = name
        self._numbers = itertools.count()
        self._waiting: deque[_Request] = deque()
        self._workers: list[_Worker] = []
        self._metrics: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[Any]] = []
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Start all workers and wait until they have loaded the rewards.

        Raises:
            RunError: a worker ended or took too long. The message has the end of its log.
        """
        await asyncio.gather(*(self._start_worker(f"{self._name}-{number}") for number in range(self._count)))
        self._tasks.append(start_task(self._watch_deadlines(), "deadlines of rewards"))

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """See `Scorer.score`."""
        request = _Request(next(self._numbers), arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._dispatch()
        return await request.result

    def pop_metrics(self) -> dict[str, float]:
        """See `Scorer.pop_metrics`."""
        metrics: dict[str, float] = dict(self._metrics)
        self._metrics.clear()
        return metrics

    async def close(self) -> None:
        """Kill all workers; safe to call twice."""
        self._closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.process.end() for worker in self._workers))

    async def _start_worker(self, name: str) -> None:
        worker = _Worker(await RewardProcess.start(name, self._run_dir, self._start_timeout_s))
        self._workers.append(worker)
        self._tasks.append(start_task(self._receive(worker), f"answers of {name}"))
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting requests to the workers with the fewest requests."""
        while self._waiting and self._workers:
            worker = min(self._workers, key=lambda w: len(w.sent))
            if len(worker.sent) >= max(REQUESTS_AHEAD, worker.process.max_concurrency):
                return
            request = self._waiting.popleft()
            if request.result.done():
                continue
            try:
                worker.process.peer.notify(Score(request.number, request.arguments))
            except PeerClosed:
                self._waiting.appendleft(request)
                return  # `_receive` is about to replace the worker
            except (TypeError, ValueError) as error:
                request.result.set_exception(RewardError(f"the data row cannot be sent to a reward process: {error}"))
                continue
            worker.sent[request.number] = request
            worker.start_clocks()

    async def _receive(self, worker: _Worker) -> None:
        try:
            while True:
                answer = await worker.process.peer.receive()
                if answer.number not in {request.number for request in worker.in_progress}:
                    worker.killed_because = "the reward process sent an unexpected answer"
                    break
                request = worker.sent.pop(answer.number)
                worker.start_clocks()
                if not request.result.done():
                    if isinstance(answer, Scored):
                        request.result.set_result(RewardScore(answer.value, dict(answer.components)))
                        self._metrics.update(answer.metrics)
                    else:
                        request.result.set_exception(RewardError(f"{answer.error}; see logs/{worker.process.name}.log"))
                self._dispatch()
        except PeerClosed:
            pass
        await self._replace(worker)

    async def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        requests = list(worker.sent.values())
        oldest = requests.pop(0) if requests else None
        self._waiting.extendleft(replace(request, since=math.inf) for request in reversed(requests))
        self._dispatch()
        end = await worker.process.end()
        if oldest is not None and not oldest.result.done():
            cause = worker.killed_because or f"the reward process {describe_exit(end.code)} while it scored this"
            oldest.result.set_exception(RewardError(cause))
        deadline = asyncio.get_running_loop().time() + START_PATIENCE_S
        is_reported = False
        while not self._closing.is_set():
            try:
                return await self._start_worker(worker.process.name)
            except (RunError, OSError) as error:
                if not self._workers and asyncio.get_running_loop().time() > deadline:
                    raise RunError(f"no reward process is left: {error}") from error
                if not is_reported:
                    self._log(f"{worker.process.name} cannot be started again, retrying: {error}")
                is_reported = True
            await asyncio.sleep(START_PAUSE_S)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            now = asyncio.get_running_loop().time()
            for worker in list(self._workers):
                worker.process.bound_log()
                # A worker that scores several requests ends late ones itself, unless something blocks it.
                limit = self._timeout_s + (BLOCKED_S if worker.process.max_concurrency > 1 else 0)
                is_late = any(now - request.since > limit for request in worker.in_progress)
                if is_late and not worker.killed_because:
                    worker.killed_because = f"the reward took longer than rollout.reward_timeout_s: {self._timeout_s:g}"
                    self._tasks.append(start_task(worker.process.end(), f"end of {worker.process.name}"))
