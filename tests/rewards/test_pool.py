"""The pool of reward processes: what becomes of its requests when workers hang, die or cannot be started."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.background import on_failure
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.messages.scores import Scored, WorkerReady
from areal_core.rewards import pool as pool_module
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.scoring import RewardError
from areal_core.runtime import frames
from areal_core.runtime.rpc import PeerClosed, adopt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

HANG_S = 30.0


class Worker:
    """A worker in a thread, which does as a request says; in place of a `RewardProcess`."""

    def __init__(self, name: str, *, comes: bool) -> None:
        self.name, self.max_concurrency = name, 1
        self.has_ended = False
        self._own, self._theirs = socket.socketpair()
        self.peer: Any = None
        if comes:
            threading.Thread(target=self._work, daemon=True).start()

    async def open(self, timeout_s: float) -> Worker:
        self.peer = await adopt(self._own)
        try:
            await asyncio.wait_for(self.peer.receive(), timeout_s)
        except TimeoutError:
            await self.end()
            raise RunError(f"a reward process is not ready: it took longer than {timeout_s:g} s") from None
        except BaseException:
            await self.end()
            raise
        return self

    def bound_log(self) -> None:
        """It has none."""

    def _work(self) -> None:
        connection = self._theirs
        try:
            frames.send(connection, WorkerReady(1))
            hangs = False
            while True:
                request = frames.receive(connection).message
                do = request.arguments["do"]
                if do == "die late":
                    time.sleep(0.3)
                if do.startswith("die"):
                    self.hang_up()
                    return
                hangs |= do == "hang"
                if not hangs:
                    number = request.number + (do == "answer another")
                    frames.send(connection, Scored(number, 1.0, {"by": float(self.name.removeprefix("reward-"))}, {}))
        except (PeerClosed, OSError):
            pass

    async def end(self) -> ProcessEnd:
        self.has_ended = True
        self.hang_up()
        return ProcessEnd(-9, "")

    def hang_up(self) -> None:
        """As the kernel does with the sockets of a process that has ended."""
        with suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)


class Workers:
    """Their next starts can be made to fail, to wait, or to bring a worker that never comes."""

    def __init__(self) -> None:
        self.started: list[Worker] = []
        self.errors: list[Exception] = []
        self.silent = 0
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self, name: str, run_dir: Path, timeout_s: float) -> Worker:
        await self.may_start.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.started.append(Worker(name, comes=not self.silent))
        self.silent = max(0, self.silent - 1)
        return await self.started[-1].open(timeout_s)


@asynccontextmanager
async def started(folder: Path, workers: Workers, **settings: Any) -> AsyncIterator[RewardPool]:
    settings = {"count": 1, "timeout_s": HANG_S, "start_timeout_s": HANG_S, **settings}
    pool = RewardPool(folder, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module.RewardProcess, "start", workers.start)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


def ask(pool: RewardPool, *does: str) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(pool.score({"do": do})) for do in does]


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), HANG_S))


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_PAUSE_S", 0.02, raising=False)


def test_a_worker_that_dies_fails_one_request_and_is_replaced(tmp_path: Path) -> None:
    async def work() -> None:
        workers = Workers()
        async with started(tmp_path, workers) as pool:
            died, *others = ask(pool, "die", "score", "score")
            with pytest.raises(RewardError, match="was killed by SIGKILL while it scored this"):
                await died
            assert [(await other).value for other in others] == [1.0, 1.0]
            assert [worker.name for worker in workers.started] == ["reward-0", "reward-0"]

    run(work)


def test_an_answer_to_something_else_is_nobodys_reward(tmp_path: Path) -> None:
    async def work() -> None:
        workers = Workers()
        async with started(tmp_path, workers) as pool:
            odd, *others = ask(pool, "answer another", "score", "score")
            with pytest.raises(RewardError, match="sent an unexpected answer"):
                await odd
            assert [(await other).value for other in others] == [1.0, 1.0]
            assert len(workers.started) == 2

    run(work)


def test_a_reward_that_hangs_fails_one_request(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path, Workers(), timeout_s=0.2) as pool:
            hung, other = ask(pool, "hang", "score")
            with pytest.raises(RewardError, match=r"longer than rollout.reward_timeout_s: 0\.2"):
                await hung
            assert (await other).value == 1.0

    run(work)


def test_requests_of_a_dead_worker_go_to_the_others_at_once(tmp_path: Path) -> None:
    """Without waiting for its replacement, which imports for seconds."""

    async def work() -> None:
        workers = Workers()
        async with started(tmp_path, workers, count=2) as pool:
            workers.may_start.clear()
            tasks = ask(pool, "die late", "score", "score", "score")
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(one).__name__ for one in found] == ["RewardError", *["RewardScore"] * 3]
            assert len(workers.started) == 2

    run(work)


@pytest.mark.parametrize("error", [RunError("there is no room"), OSError(12, "Cannot allocate memory")])
def test_a_replacement_that_cannot_be_started_for_a_moment_is_tried_again_and_told(
    tmp_path: Path, error: Exception
) -> None:
    async def work() -> None:
        workers, told = Workers(), []
        async with started(tmp_path, workers, log=told.append) as pool:
            workers.errors = [error, error, error]
            died, other = ask(pool, "die", "score")
            with pytest.raises(RewardError):
                await died
            assert (await other).value == 1.0
        assert told == [f"reward-0 cannot be started again, retrying: {error}"]

    run(work)


def test_when_nobody_is_left_to_score_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_PATIENCE_S", 0.1)

    async def work() -> None:
        workers = Workers()
        failures: asyncio.Queue[BaseException] = asyncio.Queue()
        former = on_failure(lambda _, error: failures.put_nowait(error))
        async with started(tmp_path, workers) as pool:
            workers.errors = [RunError("there is no room")] * 1000
            tasks = ask(pool, "die", "score")
            assert str(await failures.get()) == "no reward process is left: there is no room"
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        on_failure(former)

    run(work)


def test_a_worker_that_is_too_slow_to_start_is_ended(tmp_path: Path) -> None:
    async def work() -> None:
        workers = Workers()
        workers.silent = 1
        with pytest.raises(RunError, match=r"is not ready: it took longer than 0\.1 s"):
            async with started(tmp_path, workers, start_timeout_s=0.1):
                pass
        assert workers.started[0].has_ended
        workers = Workers()
        async with started(tmp_path, workers, start_timeout_s=0.5) as pool:
            workers.silent = 1
            died, other = ask(pool, "die", "score")
            assert (await other).value == 1.0, "the one after it is quick enough"
            await asyncio.gather(died, return_exceptions=True)
            assert workers.started[1].has_ended

    run(work)


def test_a_worker_that_is_being_started_is_ended_when_the_pool_closes(tmp_path: Path) -> None:
    async def work() -> None:
        workers = Workers()
        async with started(tmp_path, workers) as pool:
            workers.silent = 1
            await asyncio.gather(*ask(pool, "die"), return_exceptions=True)
            while len(workers.started) < 2:
                await asyncio.sleep(0.01)
        assert workers.started[1].has_ended

    run(work)
