"""The main function of the rollout controller: builds the rollout half of a run and serves the trainer."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sqlite3
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task, watch_event_loop
from areal_core.config import load_run
from areal_core.data.sampler import PromptSampler
from areal_core.ledger.audit import audit
from areal_core.ledger.store import Ledger
from areal_core.messages.workflows import Welcome
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.evaluation import Evaluator, play_in_workers
from areal_core.rollout.samples import SampleLog
from areal_core.rollout.service import RolloutService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runs.data_length import require_checked_rows
from areal_core.runs.engines import build_engine
from areal_core.runs.models import end_tokens, load_tokenizer, model_reference, sampling_parameters, vocabulary_size
from areal_core.runs.rollout_worker import ROLLOUTS
from areal_core.runtime.environment import SCRATCH_VARIABLE
from areal_core.runtime.event_loops import run_through_exits
from areal_core.runtime.logs import timeline_of
from areal_core.runtime.member import LOADING_SILENCE_S, current_attempt
from areal_core.runtime.messages import Forward, Forwarded, RolloutStatus
from areal_core.runtime.rpc import Failed, FrameDecoder, PeerCorrupt, encode_frame, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from areal_core.config import Resolved, RunConfig
    from areal_core.config.sections import EvaluationSection
    from areal_core.interfaces.inference import InferenceEngine
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member

STATUS_INTERVAL_S = 0.5
"""Seconds between two status messages to the driver."""
LOGGED_CAUSES = 8
"""Number of different causes of failed episodes that are logged. The ledger has all of them."""
LOST_S = 60.0
"""Seconds that this process waits for the driver to end it after the trainer has died."""


def play(run: RunFolder, member: Member) -> int:
    """Serve until the trainer sends `Goodbye` or dies, or the driver stops this process. Return the exit code."""
    run_through_exits(_serve(run, member))
    return 0


@dataclass(frozen=True)
class RolloutHalf:
    """The parts that generate in a run and in an evaluation: inference engine and rollout workers. See `begin`."""

    config: RunConfig
    tokenizer: Any
    engine: InferenceEngine
    workers: RolloutWorkers
    starting: asyncio.Future[None]
    ends: frozenset[int]
    """Tokens that end an answer."""
    vocabulary: int | None

    @classmethod
    async def begin(cls, resolved: Resolved, run: RunFolder, member: Member, *, trains: bool) -> RolloutHalf:
        """Build all parts, and start the engine concurrently: this process and the others each import for seconds.

        Args:
            resolved: the config.
            run: the run folder.
            member: this process as a member of the run.
            trains: whether the workers run training groups, and not only evaluations.

        Raises:
            RunError: the engine does not support the config, or the model has no tokenizer.
        """
        config, rollout = resolved.config, resolved.config.rollout
        assert config.workflow is not None
        scratch, model = Path(os.environ[SCRATCH_VARIABLE]), model_reference(resolved, run)
        engine = build_engine(config, run, scratch, member)

        limit = config.training.phase_timeout_s
        welcome = Welcome(trains)
        workers = RolloutWorkers(
            f"unix:{scratch / 'rollouts.sock'}",
            engine,
            count=rollout.workers,
            start_timeout_s=limit,
            welcome=welcome,
            timeline=timeline_of(run.log_path(member.name)),
            log=member.log,
        )
        member.announce(ROLLOUTS, await workers.listen())
        starting = asyncio.ensure_future(engine.start(model))
        try:
            # Let an embedded engine import first: two threads that import the same library see parts of it.
            await asyncio.sleep(0)
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            ends = await asyncio.to_thread(end_tokens, model, tokenizer)
            await workers.start()
        except BaseException:
            await _close(starting, engine, workers)
            raise
        return cls(config, tokenizer, engine, workers, starting, ends, vocabulary_size(model, tokenizer))

    def evaluator(self, section: EvaluationSection) -> Evaluator:
        """Return the evaluator of a config section. It runs episodes in the workers."""
        sampling = sampling_parameters(self.config, self.ends, section.temperature)
        return Evaluator(partial(play_in_workers, self.workers, sampling), self.workers.held_out_rows, section)

    async def close(self) -> None:
        """Close the engine and the workers; safe to call twice."""
        await _close(self.starting, self.engine, self.workers)


@asynccontextmanager
async def open_evaluator(resolved: Resolved, run: RunFolder, member: Member) -> AsyncIterator[tuple[Evaluator, Any]]:
    """Start the config's inference engine and rollout workers. Yield an evaluator of `evaluation`, and the tokenizer.

    `examples/programs/generate.py` is a program that uses it.

    Args:
        resolved: the config. It has an `evaluation` section.
        run: the run folder.
        member: this process. `rollout_groups` starts the workers and the servers beside it.

    Raises:
        RunError: the engine does not support the config, does not start, or the model has no tokenizer.
    """
    assert resolved.config.evaluation is not None
    half = await RolloutHalf.begin(resolved, run, member, trains=False)
    try:
        with member.phase("starting the inference engine"):
            await half.starting
        yield half.evaluator(resolved.config.evaluation), half.tokenizer
    finally:
        await half.close()


async def _close(starting: asyncio.Future[None], engine: InferenceEngine, workers: RolloutWorkers) -> None:
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await workers.close()
    await engine.close()


async def _serve(run: RunFolder, member: Member) -> None:
    resolved = load_run(run.path)
    config = resolved.config
    service: RolloutService | None = None
    loop = asyncio.get_running_loop()

    def on_message(message: Any, number: int) -> None:
        """Answer a forwarded request. Runs in the thread of the connection to the driver."""
        if not isinstance(message, Forward):
            return
        if (answering := service) is None:
            member.notify(Failed("the rollout controller is still starting: try again in a moment"), -number)
            return
        work = _answer(answering, message, number, member)
        try:
            loop.call_soon_threadsafe(lambda: start_task(work, "answer to a client"))
        except RuntimeError:  # the loop is closed: the run is over
            work.close()

    member.on_message(on_message)
    attempt = run.attempt(current_attempt())
    former = [one.ledger for one in run.attempts() if one.number < attempt.number]
    ledger = Ledger.take_over(attempt.ledger, former, run.path, config.checkpoint.kept_trajectories)
    member.enter("starting", config.training.phase_timeout_s, LOADING_SILENCE_S)
    half = await RolloutHalf.begin(resolved, run, member, trains=True)
    controller: RolloutController | None = None
    try:
        log = member.log
        require_checked_rows(run, half.workers.rows)
        sampler = PromptSampler(half.workers.rows, config.seed, shuffle=config.shuffle)
        half.workers.on_failure = _logging_each_cause(ledger.failed, log, sampler)
        controller = RolloutController(
            config.rollout,
            half.workers,
            half.engine,
            sampler,
            sampling_parameters(config, half.ends),
            ledger,
            half.vocabulary,
            SampleLog(run.samples),
        )
        controller.restore(discard=config.deterministic, log=member.log)
        evaluator = None
        if config.evaluation is not None:
            evaluator = half.evaluator(config.evaluation)
            evaluator.on_failure = log
        audit_now = partial(_audit, controller, run, sampler)
        service = RolloutService(controller, half.engine, evaluator, audit_now)
        await _serve_trainer(service, controller, half, config, member)
    finally:
        await half.close()
        if controller is not None:
            ledger.close(controller.open_groups)


def _logging_each_cause(
    note: Callable[[int, int, int, str], None], log: Callable[[str], None], sampler: PromptSampler
) -> Callable[[int, int, int, str], None]:
    """Return a function that records every failed try of an episode and logs each cause once.

    Two errors have the same cause if they differ only in numbers.
    """
    logged_causes: set[str] = set()

    def failed(group: int, sample: int, attempt: int, error: str) -> None:
        note(group, sample, attempt, error)
        summary = (error.strip() or "no message").splitlines()[-1][:300]
        cause = re.sub(r"\d+", "", summary)[:80]
        is_evaluation = group < 0
        if is_evaluation or cause in logged_causes or len(logged_causes) == LOGGED_CAUSES:
            return
        logged_causes.add(cause)
        message = f"an episode of data row {sampler[group][0]} failed: {summary}"
        message += "; the metric episodes/failed counts further failures of this kind"
        if len(logged_causes) == LOGGED_CAUSES:
            message += "; further causes are in the ledger only"
        log(message)

    return failed


async def _serve_trainer(
    service: RolloutService, controller: RolloutController, half: RolloutHalf, config: RunConfig, member: Member
) -> None:
    """Serve the trainer until it sends `Goodbye` or dies, or the driver stops this process."""
    status = start_task(_report(service, member), "status of the rollouts")
    try:
        with member.phase("starting the inference engine"):
            await half.starting
        scratch = Path(os.environ[SCRATCH_VARIABLE])
        server = await serve(f"unix:{scratch / 'controller.sock'}", service.serve_trainer)
        member.announce("controller", server.address)
        # Keep imported objects out of garbage collections: one over all of them blocks the event loop, and with it
        # every episode, for a quarter of a second.
        gc.collect()
        gc.freeze()
        member.enter("generating")
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:  # the driver asks for it when the trainer has ended
            with suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(stopped.set)

        member.on_stop = stop  # before this point there is nothing to close
        watch_event_loop(config.rollout.blocked_timeout_s, member.log)
        ends = [asyncio.ensure_future(event.wait()) for event in (service.done, stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if service.is_lost:  # leave the servers alone: they may serve the next attempt
            member.enter("waiting for the driver: the trainer has exited")
            await asyncio.wait(ends[1:], timeout=LOST_S)
        server.close()
        await controller.close()
    finally:
        status.cancel()


async def _audit(controller: RolloutController, run: RunFolder, sampler: PromptSampler) -> dict[str, Any]:
    """Audit a copy of the ledger, so that the rollouts continue meanwhile."""
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as copy:
        running = await controller.copy_ledger(copy)
        return asdict(await asyncio.to_thread(audit, copy, run.path, sampler, running))


async def _answer(service: RolloutService, forwarded: Forward, number: int, member: Member) -> None:
    """Answer a request that the driver forwarded."""
    try:
        (request,) = FrameDecoder().feed(forwarded.request)
        reply = await service.answer(request.message)
    except (PeerCorrupt, ValueError):
        reply = Failed("the rollout controller does not know this request")
    except Exception as error:  # noqa: BLE001 - a client must not end a run
        reply = Failed(f"the request could not be answered: {type(error).__name__}: {error}")
    member.notify(Forwarded(bytes(encode_frame(reply))), -number)


async def _report(service: RolloutService, member: Member) -> None:
    while True:
        member.notify(RolloutStatus(service.status()))
        await asyncio.sleep(STATUS_INTERVAL_S)
