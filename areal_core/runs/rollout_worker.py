"""The role of a rollout worker: loads what users write for rollouts, and runs the prompt groups that it is sent.

That is the workflow, the data, and the algorithm's group stages. What blocks this process ends it, and the driver
starts another one.
"""

from __future__ import annotations

import asyncio
import gc
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_core.background import watch_event_loop
from areal_core.config import load_run
from areal_core.launchers.member import LOADING_SILENCE_S
from areal_core.messages import connect
from areal_core.messages.hub import Notice
from areal_core.messages.workflows import WorkflowsReady
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import LocalGroups
from areal_core.rollout.remote import RemoteEngine, RemoteScorer, WorkerService
from areal_core.runs.event_loops import run_through_exits
from areal_core.runs.models import load_tokenizer, model_reference, vocabulary_size

if TYPE_CHECKING:
    from areal_core.config import Resolved
    from areal_core.launchers.member import Member
    from areal_core.messages.workflows import Welcome
    from areal_core.rewards.scoring import Scorer
    from areal_core.rollout.episodes import GenerationEngine
    from areal_core.runs.folder import RunFolder

CONNECT_TIMEOUT_S = 60.0
ROLLOUTS = "rollouts"
"""What the controller announces its address for workers as."""


def play(run: RunFolder, member: Member) -> int:
    """Serve until the controller is gone."""
    run_through_exits(_serve(run, member))
    return 0


async def _serve(run: RunFolder, member: Member) -> None:
    with member.phase("loading workflow and data", silence_s=LOADING_SILENCE_S):
        resolved = load_run(run.path)
        _bound_memory(resolved.config.rollout.worker_memory_gib)
        limit = resolved.config.training.phase_timeout_s
        address = await asyncio.to_thread(member.ask, ROLLOUTS, limit)
        peer = await connect(address, CONNECT_TIMEOUT_S, member.name)
        welcome = await peer.receive()
        engine = RemoteEngine(peer, tells_places=welcome.tells_places, images=welcome.images)
        scorer = RemoteScorer(peer)
        loaded = await asyncio.to_thread(load_groups, resolved, run, engine, scorer, welcome)
    service = WorkerService(peer, loaded.groups, engine)
    peer.notify(WorkflowsReady(loaded.rows, loaded.held_out_rows))
    gc.collect()
    gc.freeze()  # see the controller
    member.announce("worker", "")
    member.enter("running episodes")
    watch_event_loop(resolved.config.rollout.blocked_timeout_s, lambda text: member.notify(Notice(text)))
    await service.serve()


def _bound_memory(gib: float | None) -> None:
    """Bound what this process may allocate; and where the machine runs out, let the kernel end this one first."""
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    if gib is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * (1 << 30)),) * 2)


class LoadedGroups(NamedTuple):
    """What runs prompt groups, and how many rows there are, 0 where they were not asked for."""

    groups: LocalGroups
    rows: int
    held_out_rows: int


def load_groups(
    resolved: Resolved, run: RunFolder, engine: GenerationEngine, scorer: Scorer, welcome: Welcome
) -> LoadedGroups:
    """Load all code of users that runs in this process.

    Args:
        resolved: the config.
        run: its folder.
        engine: generates.
        scorer: the run's rewards.
        welcome: says which data sets are needed.
    """
    config, model = resolved.config, model_reference(resolved, run)
    assert config.workflow is not None
    tokenizer = load_tokenizer(model)
    runner = EpisodeRunner(
        config.workflow.build(),
        engine,
        scorer,
        tokenizer,
        seed=config.seed,
        vocabulary=vocabulary_size(model, tokenizer),
        max_retries=config.rollout.max_retries,
    )
    dataset = config.dataset.build() if welcome.trains else None
    held_out = config.evaluation.dataset.build() if welcome.evaluates and config.evaluation is not None else None
    stages = config.algorithm.build().group_stages if welcome.trains else ()
    groups = LocalGroups(runner, dataset, held_out, stages, config.rollout)
    return LoadedGroups(groups, *(0 if rows is None else len(rows) for rows in (dataset, held_out)))
