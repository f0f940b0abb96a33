"""The main function of a rollout worker: loads the user's workflow, data and group filters, and runs prompt groups.

If user code blocks the event loop for too long, the process ends itself and the driver starts a new worker.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.background import watch_event_loop
from areal_core.config import load_run
from areal_core.ledger.segments import SegmentWriter
from areal_core.messages.workflows import WorkflowsReady
from areal_core.metric_names import prefix_of
from areal_core.rewards.pool import RewardPool
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteSlots, WorkerService
from areal_core.runs.engines import build_engine
from areal_core.runs.models import end_tokens, load_tokenizer, model_reference, vocabulary_size
from areal_core.runtime.environment import SCRATCH_VARIABLE
from areal_core.runtime.event_loops import run_through_exits
from areal_core.runtime.member import LOADING_SILENCE_S, current_attempt
from areal_core.runtime.rpc import connect

if TYPE_CHECKING:
    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.inference import InferenceClient
    from areal_core.messages.workflows import Welcome
    from areal_core.rewards.scoring import Scorer
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member

CONNECT_TIMEOUT_S = 60.0
"""Seconds to connect to the rollout controller."""
GC_THRESHOLD = 10_000
"""New objects between two garbage collections. Python's default of 700 takes a tenth of a worker's time, because
episodes create many objects and few reference cycles."""
ROLLOUTS = "rollouts"
"""Name under which the controller announces its address for workers."""


def play(run: RunFolder, member: Member) -> int:
    """Run prompt groups until the controller closes the connection. Return the exit code."""
    run_through_exits(_serve(run, member))
    return 0


async def _serve(run: RunFolder, member: Member) -> None:
    with member.phase("loading workflow and data", silence_s=LOADING_SILENCE_S):
        resolved = load_run(run.path)
        _bound_memory(resolved.config.rollout.worker_memory_gib)
        limit = resolved.config.training.phase_timeout_s
        address = await asyncio.to_thread(member.lookup, ROLLOUTS, limit)
        peer = await connect(address, CONNECT_TIMEOUT_S, member.name)
        welcome = await peer.receive()
        slots = RemoteSlots(peer)
        engine = build_engine(resolved.config, run, Path(os.environ[SCRATCH_VARIABLE]), member)
        client = engine.client(slots, model_reference(resolved, run))
        scorer = _rewards(resolved.config, run, member)
        loading = asyncio.to_thread(_load_groups, resolved, run, member, client, scorer, welcome)
        try:  # concurrently, because both import for seconds
            (groups, *rows), _ = await asyncio.gather(loading, scorer.start())
        except BaseException:
            await scorer.close()
            raise
    service = WorkerService(peer, groups, slots)
    peer.notify(WorkflowsReady(*rows))
    gc.collect()
    gc.freeze()  # see `areal_core.runs.controller`
    gc.set_threshold(GC_THRESHOLD)
    member.announce("worker", "")
    member.enter("running episodes")
    watch_event_loop(resolved.config.rollout.blocked_timeout_s, member.log)
    try:
        await service.serve()
    finally:
        await client.close()
        await scorer.close()


def _rewards(config: RunConfig, run: RunFolder, member: Member) -> RewardPool:
    """Return the pool of this worker's share of the run's reward processes."""
    rollout = config.rollout
    return RewardPool(
        run.path,
        count=-(-rollout.reward_processes // rollout.workers),
        timeout_s=rollout.reward_timeout_s,
        start_timeout_s=config.training.phase_timeout_s,
        log=member.log,
        name=f"{member.name}-reward" if rollout.workers > 1 else "reward",
    )


def _bound_memory(gib: float | None) -> None:
    """Limit the memory of this process, and make it the first that the kernel kills if the machine runs out."""
    with suppress(OSError):  # only Linux has this file
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    if gib is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * (1 << 30)),) * 2)


def _load_groups(
    resolved: Resolved, run: RunFolder, member: Member, client: InferenceClient, scorer: Scorer, welcome: Welcome
) -> tuple[GroupRunner, int, int]:
    """Load all user code. Return the group runner, the number of training rows and that of evaluation rows."""
    config, model = resolved.config, model_reference(resolved, run)
    assert config.workflow is not None
    segments = None
    if welcome.trains:
        segments = SegmentWriter(run.attempt(current_attempt()).segments, run.path, member.name, member.log)
    tokenizer = load_tokenizer(model)
    runner = EpisodeRunner(
        config.workflow.build(),
        client,
        scorer,
        tokenizer,
        seed=config.seed,
        vocabulary=vocabulary_size(model, tokenizer),
        max_retries=config.rollout.max_retries,
        failed_reward=config.rollout.failed_reward,
        end_ids=end_tokens(model, tokenizer),
        metric_prefix=prefix_of(config.workflow.plugin),
    )
    dataset = config.dataset.build() if welcome.trains else None
    held_out = config.evaluation.dataset.build() if config.evaluation is not None else None
    filters = config.algorithm.build().group_filters if welcome.trains else ()
    groups = GroupRunner(runner, dataset, held_out, filters, config.rollout, segments)
    return groups, 0 if dataset is None else len(dataset), 0 if held_out is None else len(held_out)
