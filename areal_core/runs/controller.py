"""The role of the rollout controller: builds the rollout half of a run and serves the trainer."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sqlite3
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task, watch_event_loop
from areal_core.config import load_run
from areal_core.data.sampler import PromptSampler
from areal_core.launchers.guard import SCRATCH_VARIABLE, timeline_of
from areal_core.launchers.member import LOADING_SILENCE_S, current_attempt
from areal_core.ledger.audit import audit
from areal_core.ledger.store import Ledger
from areal_core.messages import Failed, FrameDecoder, PeerCorrupt, encode_frame, serve
from areal_core.messages.hub import Forward, Forwarded, Status
from areal_core.messages.workflows import Welcome
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.evaluation import Evaluator, play_in_workers
from areal_core.rollout.samples import SampleLog
from areal_core.rollout.service import RolloutService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runs.engines import build_engine
from areal_core.runs.event_loops import run_through_exits
from areal_core.runs.models import end_tokens, load_tokenizer, model_reference, sampling_parameters, vocabulary_size
from areal_core.runs.rollout_worker import ROLLOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.config import Resolved, RunConfig
    from areal_core.config.sections import EvaluationSection
    from areal_core.interfaces import InferenceEngine
    from areal_core.launchers.member import Member
    from areal_core.runs.folder import RunFolder

STATUS_INTERVAL_S = 0.5
CAUSES_TOLD = 8
"""Of failed episodes; what others failed with stands in the ledger."""
LOST_S = 60.0
"""For the driver to end this process when the trainer has died."""


def play(run: RunFolder, member: Member) -> int:
    """Serve until the trainer has said goodbye or died, or this process is told to stop."""
    run_through_exits(_serve(run, member))
    return 0


@dataclass(frozen=True)
class RolloutHalf:
    """What a run and an evaluation generate with: engine and rollout workers; made by `begin`."""

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
        """All parts, their processes starting: each imports for seconds, as this one does, so they do it side by side.

        Args:
            resolved: the config.
            run: its folder.
            member: this process in the run.
            trains: whether there will be more than evaluations.

        Raises:
            RunError: the engine cannot do what the config asks of it, or the model has no tokenizer.
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
            await asyncio.sleep(0)  # an engine of this process imports first: two threads would import half a library
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            ends = await asyncio.to_thread(end_tokens, model, tokenizer)
            await workers.start()
        except BaseException:
            await _close(starting, engine, workers)
            raise
        return cls(config, tokenizer, engine, workers, starting, ends, vocabulary_size(model, tokenizer))

    def evaluator(self, section: EvaluationSection) -> Evaluator:
        """Plays the episodes of an evaluation."""
        sampling = sampling_parameters(self.config, self.ends, section.temperature)
        return Evaluator(partial(play_in_workers, self.workers, sampling), self.workers.held_out_rows, section)

    async def close(self) -> None:
        """End both; safe to call twice."""
        await _close(self.starting, self.engine, self.workers)


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
        """In the thread of the connection to the driver."""
        if not isinstance(message, Forward):
            return
        if (answering := service) is None:
            member.notify(Failed("the rollout controller is still starting: ask again in a moment"), -number)
            return
        work = _answer(answering, message, number, member)
        try:
            loop.call_soon_threadsafe(lambda: start_task(work, "answer to a client"))
        except RuntimeError:  # the loop is closed: the run is over
            work.close()

    member.on_message(on_message)
    attempt = run.attempt(current_attempt())
    former = [one.ledger for one in run.attempts() if one.number < attempt.number]
    ledger = Ledger.take_over(attempt.ledger, former, run.path)
    member.enter("starting", config.training.phase_timeout_s, LOADING_SILENCE_S)
    half = await RolloutHalf.begin(resolved, run, member, trains=True)
    controller: RolloutController | None = None
    try:
        log = member.log
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
    """Notes every failed attempt of an episode, and tells of each cause once, for one that recurs fills a screen."""
    told: set[str] = set()

    def failed(group: int, sample: int, attempt: int, error: str) -> None:
        note(group, sample, attempt, error)
        words = (error.strip() or "no words").splitlines()[-1][:300]
        cause = re.sub(r"\d+", "", words)[:80]
        if group >= 0 and cause not in told and len(told) < CAUSES_TOLD:
            told.add(cause)
            last = "; further causes stand in the ledger" * (len(told) == CAUSES_TOLD)
            row = sampler[group][0]
            log(f"an episode of data row {row} failed: {words}; more like it are counted in episodes/failed{last}")

    return failed


async def _serve_trainer(
    service: RolloutService, controller: RolloutController, half: RolloutHalf, config: RunConfig, member: Member
) -> None:
    """Generate for the trainer until it has said goodbye or died, or this process is told to stop."""
    status = start_task(_report(service, member), "status of the rollouts")
    try:
        with member.phase("starting the inference engine"):
            await half.starting
        scratch = Path(os.environ[SCRATCH_VARIABLE])
        server = await serve(f"unix:{scratch / 'controller.sock'}", service.serve_trainer)
        member.announce("controller", server.address)
        # What was imported lives as long as this process: a collection that went over all of it would hold up the event
        # loop, and with it every episode, for a quarter of a second.
        gc.collect()
        gc.freeze()
        member.enter("generating")
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:  # by the driver, once the trainer has ended
            with suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(stopped.set)

        member.on_stop = stop  # until now there was nothing to close
        watch_event_loop(config.rollout.blocked_timeout_s, member.log)
        ends = [asyncio.ensure_future(event.wait()) for event in (service.done, stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if service.is_lost:  # servers that outlive it are not this process's to end
            member.enter("waiting to be stopped: the trainer has exited")
            await asyncio.wait(ends[1:], timeout=LOST_S)
        server.close()
        await controller.close()
    finally:
        status.cancel()


async def _audit(controller: RolloutController, run: RunFolder, sampler: PromptSampler) -> dict[str, Any]:
    """Of the ledger as it is now; the rollouts go on while its copy is looked through."""
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as copy:
        running = await controller.copy_ledger(copy)
        return asdict(await asyncio.to_thread(audit, copy, run.path, sampler, running))


async def _answer(service: RolloutService, forwarded: Forward, number: int, member: Member) -> None:
    """The reply to a question that came through the driver."""
    try:
        (request,) = FrameDecoder().feed(forwarded.request)
        reply = await service.answer(request.message)
    except (PeerCorrupt, ValueError):
        reply = Failed("this run does not know the request")
    except Exception as error:  # noqa: BLE001 - a client never ends a run
        reply = Failed(f"the request could not be answered: {type(error).__name__}: {error}")
    member.notify(Forwarded(bytes(encode_frame(reply))), -number)


async def _report(service: RolloutService, member: Member) -> None:
    while True:
        member.notify(Status(service.status()))
        await asyncio.sleep(STATUS_INTERVAL_S)
