"""A pool of processes that compute rewards, so that a reward may block, hang or crash without harm.

Each worker is sent requests ahead and works on the oldest: on one at a time, on several where rewards are coroutines.
These have a deadline; a worker that misses one is killed and replaced. Only its oldest request fails, for that is the
one whose reward is to blame where there is but one, and the others go to another worker. A replacement that
cannot be started will be retried: the machine may be out of memory or of room for a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.workflow import RewardScore
from areal_core.messages import PeerClosed
from areal_core.messages.scores import Score, Scored
from areal_core.rewards.child import RewardProcess
from areal_core.rewards.scoring import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

REQUESTS_AHEAD = 32
BLOCKED_S = 5.0
"""After which a worker of several requests, one of which is overdue, must itself have said so."""
START_PAUSE_S, START_PATIENCE_S = 5.0, 60.0
"""Before a replacement that could not be started is tried again; for how long, where no other worker is left."""


@dataclass(slots=True)
class _Request:
    number: int
    arguments: Mapping[str, Any]
    result: asyncio.Future[RewardScore]
    since: float = math.inf  # when a worker began with it


@dataclass(slots=True, eq=False)
class _Worker:
    process: RewardProcess
    sent: dict[int, _Request] = field(default_factory=dict)
    killed_because: str = ""

    @property
    def worked_on(self) -> list[_Request]:
        """The oldest requests, as many as it takes at a time."""
        return list(itertools.islice(self.sent.values(), self.process.max_concurrency))

    def begin(self) -> None:
        """The clocks of those that it works on now run."""
        now = asyncio.get_running_loop().time()
        for request in self.worked_on:
            request.since = min(request.since, now)


class RewardPool:
    """Scores completions in worker processes; implements `Scorer`.

    Args:
        run_dir: the run whose rewards the workers load, the same way as every process of the run.
        count: how many workers.
        timeout_s: for one completion with all rewards of the run.
        start_timeout_s: for a worker to load the rewards.
        log: told of a worker that cannot be replaced for now.
        name: of the workers, before the number of each.
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
            RunError: a worker ended before it was ready; with its own words.
        """
        await asyncio.gather(*(self._start_worker(f"{self._name}-{number}") for number in range(self._count)))
        self._tasks.append(start_task(self._watch_deadlines(), "deadlines of rewards"))

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """See `Scorer.score`."""
        request = _Request(next(self._numbers), arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._dispatch()
        return await request.result

    def take_metrics(self) -> dict[str, float]:
        """See `Scorer.take_metrics`."""
        taken, self._metrics = self._metrics, Counter()
        return dict(taken)

    async def close(self) -> None:
        """End all workers; safe to call twice."""
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
        """Hand waiting requests to the workers with the fewest."""
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
                return  # the worker is about to be replaced
            except (TypeError, ValueError) as error:
                request.result.set_exception(RewardError(f"the data row cannot be sent to a reward process: {error}"))
                continue
            worker.sent[request.number] = request
            worker.begin()

    async def _receive(self, worker: _Worker) -> None:
        try:
            while True:
                answer = await worker.process.peer.receive()
                if answer.number not in {request.number for request in worker.worked_on}:
                    worker.killed_because = "the reward process sent an unexpected answer"
                    break
                request = worker.sent.pop(answer.number)
                worker.begin()
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
        sent = list(worker.sent.values())
        head = sent.pop(0) if sent else None
        self._waiting.extendleft(replace(request, since=math.inf) for request in reversed(sent))
        self._dispatch()
        end = await worker.process.end()
        if head is not None and not head.result.done():
            died = f"the reward process {describe_exit(end.code)} while it scored this"
            head.result.set_exception(RewardError(worker.killed_because or died))
        deadline, is_reported = asyncio.get_running_loop().time() + START_PATIENCE_S, False
        while not self._closing.is_set():
            try:
                return await self._start_worker(worker.process.name)
            except (RunError, OSError) as error:
                if not self._workers and asyncio.get_running_loop().time() > deadline:
                    raise RunError(f"no reward process is left: {error}") from error  # nothing can be scored any more
                if not is_reported:
                    self._log(f"{worker.process.name} cannot be replaced and will be retried: {error}")
                is_reported = True
            await asyncio.sleep(START_PAUSE_S)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            now = asyncio.get_running_loop().time()
            for worker in list(self._workers):
                worker.process.bound_log()
                # One that works on several ends those that take too long itself, unless something blocks it.
                limit = self._timeout_s + (BLOCKED_S if worker.process.max_concurrency > 1 else 0)
                late = any(now - request.since > limit for request in worker.worked_on)
                if late and not worker.killed_because:
                    worker.killed_because = f"the reward took longer than rollout.reward_timeout_s: {self._timeout_s:g}"
                    self._tasks.append(start_task(worker.process.end(), f"end of {worker.process.name}"))
