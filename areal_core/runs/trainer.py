"""The role of one rank of the trainer."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from areal_core.config import load_run
from areal_core.config.needs import roles_of
from areal_core.diagnostics import Watch
from areal_core.errors import RunError
from areal_core.interfaces import AdapterEngine, ComparingEngine, OptimizerSettings
from areal_core.launchers.guard import SCRATCH_VARIABLE
from areal_core.launchers.machine import is_loopback
from areal_core.launchers.member import ASKED_TO_STOP, LOADING_SILENCE_S, NODES_VARIABLE, current_attempt
from areal_core.ledger.store import Ledger
from areal_core.messages.hub import StepMetrics
from areal_core.runs.models import check_same_tokens, load_tokenizer, model_path, model_reference
from areal_core.training.batches import read_batch
from areal_core.training.checkpoint import ConsumptionLog, restore_checkpoint
from areal_core.training.distribution import open_store, share_beginning
from areal_core.training.examples import ExampleSource, read_examples
from areal_core.training.exports import exports_policy
from areal_core.training.learner import Learner
from areal_core.training.loop import Trainer
from areal_core.training.metrics_logger import MetricsLogger
from areal_core.training.rollouts import RolloutClient
from areal_core.training.weight_sync import KEPT, WeightSync, roomy_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from areal_core.config import Resolved, RunConfig
    from areal_core.config.sections import TrainingSection
    from areal_core.interfaces import ModelReference, Role, TrainEngine
    from areal_core.launchers.member import Member
    from areal_core.runs.folder import AttemptFolder, RunFolder
    from areal_core.training.source import BatchSource

UNTIMED = ("wait", "evaluate")
"""Phases whose waits have deadlines of their own: of an episode, and of progress."""


def play(run: RunFolder, member: Member) -> int:
    """Train to the end, or until the run is interrupted."""
    resolved = load_run(run.path)
    config = resolved.config
    member.enter("starting", config.training.phase_timeout_s, LOADING_SILENCE_S)
    if torch.get_num_threads() != (threads := int(os.environ.get("OMP_NUM_THREADS", "0"))) and threads:
        torch.set_num_threads(threads)  # torch may have been imported before the variable was set
    torch.manual_seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(mode=True)
    _join_ranks(member, config.training)
    try:
        finished = _train(resolved, run, member)
    finally:
        dist.destroy_process_group()
    return 0 if finished else ASKED_TO_STOP


def _join_ranks(member: Member, section: TrainingSection) -> None:
    """Form the group of all ranks. On one machine they meet in a file of this user's, else at a port of rank 0: its
    store takes keys from anybody who can reach it."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = None
    if rank == 0 and is_loopback(member.host):
        member.announce("rendezvous", f"{Path(os.environ[SCRATCH_VARIABLE]) / 'rendezvous'}:")
    elif rank == 0:
        store = open_store(member.host)
        member.announce("rendezvous", f"{member.host}:{store.port}")
    place, _, port = member.ask("rendezvous", section.phase_timeout_s).rpartition(":")
    if store is None:
        store = TCPStore(place, int(port), ranks, is_master=False) if port else FileStore(place, ranks)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=section.collective_timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def _train(resolved: Resolved, run: RunFolder, member: Member) -> bool:
    config, is_first = resolved.config, dist.get_rank() == 0
    interruption = threading.Event()
    attempt = run.attempt(current_attempt())
    model = model_reference(resolved, run)
    algorithm = config.algorithm.build()
    needs_rollouts = algorithm.encode is None
    if needs_rollouts and config.workflow is None:
        raise RunError("the algorithm learns from rollouts, and the config has no workflow and no inference_engine")
    roles = roles_of(config.algorithm, config.training.updates)
    limit = config.training.phase_timeout_s  # a large model may load for long; deaths are noticed at once
    with member.phase("loading the model", limit, LOADING_SILENCE_S):
        engines = build_engines(resolved, model, roles, config.sampling.temperature if needs_rollouts else 1.0)
    is_heard = bool(config.trackers) or resolved.plugins.events.has_listeners("areal_batch_logged")
    learner = Learner(config, algorithm, roles, engines, config.training.logged_groups if is_heard else 0)
    rollouts = None
    if is_first and needs_rollouts:
        rollouts = RolloutClient(member.ask("controller", limit), is_interrupted=interruption.is_set, log=_log)
    source: BatchSource | None = rollouts
    if is_first and rollouts is None:
        former = [one.ledger for one in run.attempts() if one.number < attempt.number]
        ledger = Ledger.take_over(attempt.ledger, former, run.path)
        encode = partial(algorithm.encode, tokenizer=load_tokenizer(model))
        source = ExampleSource(config.dataset.build(), encode, config, ledger, interruption.is_set)
    beginning = share_beginning(source.where_to_begin() if source is not None else None)
    consumption_log = ConsumptionLog()
    if beginning.checkpoint is not None:
        consumption_log = restore_checkpoint(beginning.checkpoint, learner.changing, beginning.digest)
    weight_sync = _weight_sync(config, attempt, model, learner.policy, rollouts, member) if needs_rollouts else None
    # Of a step whose evaluation is still owed the metrics are written again.
    first = beginning.step - (consumption_log.unevaluated is not None)

    def phase(name: str) -> AbstractContextManager[None]:
        return member.phase(name, 0.0 if name in UNTIMED else limit)

    metrics_logger = _metrics_logger(resolved, run, member, first, phase) if is_first else None
    read = partial(read_batch, run.path, config.rollout) if needs_rollouts else read_examples
    trainer = Trainer(config, learner, weight_sync, run.path, attempt.checkpoints, source, read, metrics_logger, phase)
    begins_elsewhere = needs_rollouts and isinstance(learner.policy, AdapterEngine) and learner.policy.begins_elsewhere
    member.enter("train", limit)
    member.on_stop = interruption.set  # until now there was nothing to keep, and a rank that is told to stop ends
    try:
        return trainer.run(beginning.step, beginning.version or int(begins_elsewhere), consumption_log)
    finally:
        opened: list[Any] = [metrics_logger, source, weight_sync, *engines.values()]
        for each in filter(None, opened):
            each.close()


def _weight_sync(
    config: RunConfig,
    attempt: AttemptFolder,
    model: ModelReference,
    engine: TrainEngine,
    rollouts: RolloutClient | None,
    member: Member,
) -> WeightSync:
    section, dtype = config.weight_sync, getattr(torch, model.dtype)
    transport = section.transport.build(
        engine=engine,
        rollouts=rollouts,
        dtype=dtype,
        address=section.address or member.host,
        gpu=(config.placement.training or [0] * dist.get_world_size())[dist.get_rank()],
        timeout_s=section.timeout_s,
    )
    return WeightSync(section, engine, rollouts, transport, _weights_folders(config, attempt, model), dtype)


def build_engines(
    resolved: Resolved, model: ModelReference, roles: Mapping[str, Role], temperature: float
) -> dict[str, TrainEngine]:
    """An engine for each role, with the settings and the model of its section where it has one.

    A role that never changes and has no section is the base of another engine's adapter, where there is one.
    """
    config = resolved.config
    idle_steps = getattr(config.algorithm.settings, "idle_steps", None)
    rate = getattr(config.algorithm.settings, "default_learning_rate", 1e-6)
    engines: dict[str, TrainEngine] = {}
    for name, role in sorted(roles.items(), key=lambda item: not item[1].changes):
        chosen = config.roles.get(name, config.train_engine)
        path = getattr(chosen.common, "path", None)
        its_model = model
        if path is not None:
            its_model = replace(model, path=model_path(resolved, path, f"roles.{name}.path"))
            check_same_tokens(model, name, its_model)
        adapted = [e for e in engines.values() if isinstance(e, AdapterEngine) and chosen is config.train_engine]
        base = next(filter(None, (engine.reference_from_base(its_model, role) for engine in adapted)), None)
        engines[name] = base or chosen.build()
        steps = config.steps - (idle_steps(name) if idle_steps else 0)
        if base is None:
            is_policy = name == next(iter(roles))
            its_rate = rate if is_policy else 10 * rate  # a critic begins with a head that knows nothing
            updates, is_exported = steps * config.training.updates, is_policy and exports_policy(config)
            engines[name].setup(its_model, role, OptimizerSettings(updates, temperature, its_rate, is_exported))
    for engine in engines.values():
        if isinstance(engine, ComparingEngine):
            engine.compare_with(engines)
    return engines


def _weights_folders(config: RunConfig, attempt: AttemptFolder, model: ModelReference) -> list[Path]:
    """Where weights are synced, best first; empty. In memory only where all versions that are kept have room."""
    are_apart = config.has_servers and (int(os.environ.get(NODES_VARIABLE, "1")) > 1 or config.has_elastic_servers)
    are_apart = are_apart or getattr(getattr(config.inference_engine, "settings", None), "has_distant", False)
    # Servers on other nodes see the run's folder alone.
    if config.weight_sync.transport.target == "core/disk" or are_apart:
        folders = [attempt.weights]
    else:
        folders = [Path(os.environ[SCRATCH_VARIABLE]) / "weights", attempt.weights]
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return folders[folders.index(roomy_folder(folders, size * (KEPT + 1))) :]
    return folders


def _metrics_logger(
    resolved: Resolved,
    run: RunFolder,
    member: Member,
    step: int,
    phase: Callable[[str], AbstractContextManager[None]],
) -> MetricsLogger:
    watch = Watch(run.path, resolved.config, step, member.log, run.read_metrics())

    def on_step(line: dict[str, float]) -> None:
        member.notify(StepMetrics(line))
        watch.add(line)

    metrics_logger = MetricsLogger(
        run.metrics,
        step,
        trackers=[selection.build() for selection in resolved.config.trackers],
        hooks=[resolved.plugins.events],
        on_step=on_step,
        phase=phase,
        log=member.log,
    )
    resolved.plugins.events.log = member.log
    metrics_logger.start_trackers(run.path, resolved.config.model_dump(mode="json"))
    return metrics_logger


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # line by line, as Python's standard error is
