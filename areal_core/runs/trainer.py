"""The role of one rank of the trainer."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from areal_core.config import load_run
from areal_core.config.needs import roles_of
from areal_core.diagnostics import Watch
from areal_core.disk import is_in_memory
from areal_core.errors import RunError
from areal_core.interfaces.training import AdapterEngine, ComparingEngine, OptimizerSettings
from areal_core.ledger.store import Ledger
from areal_core.runs.data_length import require_checked_rows
from areal_core.runs.models import check_same_tokens, load_tokenizer, model_path, model_reference
from areal_core.runs.ranks import trainer_rank
from areal_core.runtime.environment import NODES_VARIABLE, SCRATCH_VARIABLE
from areal_core.runtime.member import ASKED_TO_STOP, LOADING_SILENCE_S, current_attempt
from areal_core.runtime.messages import StepMetrics
from areal_core.training.batches import read_batch
from areal_core.training.checkpoint import restore_checkpoint
from areal_core.training.collectives import is_main
from areal_core.training.examples import ExampleSource, read_examples
from areal_core.training.exports import exports_policy
from areal_core.training.learner import Learner
from areal_core.training.loop import Trainer
from areal_core.training.metrics_logger import MetricsLogger, SilentMetricsLogger
from areal_core.training.rollout_client import RolloutClient
from areal_core.training.source import SharedSource
from areal_core.training.state import TrainerState
from areal_core.training.weight_sync import (
    KEPT_VERSIONS,
    FolderTransport,
    WeightFolder,
    WeightSync,
    choose_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.model import ModelReference, Role
    from areal_core.interfaces.training import TrainEngine
    from areal_core.runtime.folder import AttemptFolder, RunFolder
    from areal_core.runtime.member import Member

UNTIMED = ("wait", "evaluate")
"""Phases without a timeout of their own, because what they wait for has one: episodes, and progress of rollouts."""


def play(run: RunFolder, member: Member) -> int:
    """Train to the last step, or until a plugin stops the run or it is interrupted. Return the exit code."""
    resolved = load_run(run.path)
    config = resolved.config
    member.enter("starting", config.training.phase_timeout_s, LOADING_SILENCE_S)
    with trainer_rank(member, config):
        finished = _train(resolved, run, member)
    return 0 if finished else ASKED_TO_STOP


def _train(resolved: Resolved, run: RunFolder, member: Member) -> bool:
    """Build the trainer of this rank and run it. Return what `Trainer.run` returns."""
    config = resolved.config
    interruption = threading.Event()
    attempt = run.attempt(current_attempt())
    model = model_reference(resolved, run)
    algorithm = config.algorithm.build()
    needs_rollouts = algorithm.encode is None
    if needs_rollouts and config.workflow is None:
        raise RunError("the algorithm learns from rollouts, and the config has no workflow and no inference_engine")
    roles = roles_of(config.algorithm, config.training.updates)
    limit = config.training.phase_timeout_s  # a large model may load for long; deaths are noticed immediately
    with member.phase("loading the model", limit, LOADING_SILENCE_S):
        engines = build_engines(resolved, model, roles, config.sampling.temperature if needs_rollouts else 1.0)
    logs_batches = bool(config.trackers) or resolved.plugins.events.has_listeners("areal_batch_logged")
    learner = Learner(config, algorithm, roles, engines, config.training.logged_groups if logs_batches else 0)

    rollouts: RolloutClient | None = None
    examples: ExampleSource | None = None
    if is_main() and needs_rollouts:
        rollouts = RolloutClient(member.lookup("controller", limit), is_interrupted=interruption.is_set, log=_log)
    elif is_main():
        former = [earlier.ledger for earlier in run.attempts() if earlier.number < attempt.number]
        ledger = Ledger.take_over(attempt.ledger, former, run.path)
        encode = partial(algorithm.encode, tokenizer=load_tokenizer(model))
        dataset = config.dataset.build()
        require_checked_rows(run, len(dataset))
        examples = ExampleSource(dataset, encode, config, ledger, interruption.is_set)
    read = partial(read_batch, run.path, config.rollout) if needs_rollouts else read_examples
    source = SharedSource(rollouts or examples, read)

    resume_point = source.resume_point()
    version, state = resume_point.version, TrainerState()
    if resume_point.checkpoint is not None:
        state = restore_checkpoint(resume_point.checkpoint, learner.changing, resume_point.digest)
    weight_sync = None
    if needs_rollouts:
        weight_sync = _weight_sync(config, attempt, model, learner.policy, rollouts, member)
        if not version and isinstance(learner.policy, AdapterEngine) and learner.policy.begins_elsewhere:
            version = 1  # the servers have loaded the model without the adapter

    def phase(name: str) -> AbstractContextManager[None]:
        return member.phase(name, 0.0 if name in UNTIMED else limit)

    metrics_logger = _metrics_logger(resolved, run, member, state, phase) if is_main() else SilentMetricsLogger(phase)
    trainer = Trainer(config, learner, weight_sync, run.path, attempt.checkpoints, source, metrics_logger, state)
    member.enter("train", limit)
    member.on_stop = interruption.set  # before, a rank that is asked to stop has nothing to keep and simply ends
    try:
        return trainer.run(version)
    finally:
        metrics_logger.close()
        source.close()
        if weight_sync is not None:
            weight_sync.close()
        learner.close()


def _weight_sync(
    config: RunConfig,
    attempt: AttemptFolder,
    model: ModelReference,
    engine: TrainEngine,
    rollouts: RolloutClient | None,
    member: Member,
) -> WeightSync:
    section = config.weight_sync
    transport = section.transport.build(
        engine=engine,
        rollouts=rollouts,
        address=section.address or member.host,
        gpu=(config.placement.training or [0] * dist.get_world_size())[dist.get_rank()],
        timeout_s=section.timeout_s,
    )
    in_memory = True
    if isinstance(transport, FolderTransport):
        in_memory = transport.in_memory
        transport = None
    folders, memory = _weights_folders(config, attempt, model, in_memory=in_memory), _memory_folder()
    # Other file systems may grant a lease on a file that a server has mapped: overlayfs does.
    folder = WeightFolder(engine, folders, memory if is_in_memory(memory.resolve()) else None)
    return WeightSync(section, engine, rollouts, transport, folder)


def build_engines(
    resolved: Resolved, model: ModelReference, roles: Mapping[str, Role], temperature: float
) -> dict[str, TrainEngine]:
    """Return an engine for each role, with the settings and the model of its section if it has one.

    A role that never changes and has no section uses the base model of another engine's adapter, if there is one.
    """
    config = resolved.config
    idle_steps = getattr(config.algorithm.settings, "idle_steps", None)
    rate = getattr(config.algorithm.settings, "default_learning_rate", 1e-6)
    shows_images = config.workflow is not None and bool(config.workflow.declared("shows_images"))
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
            its_rate = rate if is_policy else 10 * rate  # a critic begins with an untrained head
            updates, is_exported = steps * config.training.updates, is_policy and exports_policy(config)
            its_settings = OptimizerSettings(updates, temperature, its_rate, is_exported, shows_images)
            engines[name].setup(its_model, role, its_settings)
    for engine in engines.values():
        if isinstance(engine, ComparingEngine):
            engine.compare_with(engines)
    return engines


def _memory_folder() -> Path:
    return Path(os.environ[SCRATCH_VARIABLE]) / "weights"


def _weights_folders(
    config: RunConfig, attempt: AttemptFolder, model: ModelReference, *, in_memory: bool
) -> list[Path]:
    """Return empty folders for synced weights, best first.

    Args:
        config: of the run.
        attempt: whose folder servers on other machines can read.
        model: the size of its files decides whether memory has room for all versions that are kept.
        in_memory: whether to prefer memory if all servers are on this machine.
    """
    are_apart = config.has_servers and (int(os.environ.get(NODES_VARIABLE, "1")) > 1 or config.has_elastic_servers)
    are_apart = are_apart or getattr(getattr(config.inference_engine, "settings", None), "has_distant", False)
    folders = [attempt.weights]
    if in_memory and not are_apart:
        folders.insert(0, _memory_folder())
    if is_main():
        size = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        first = choose_folder(folders, size * (KEPT_VERSIONS + 1))
        return folders[folders.index(first) :]
    return folders


def _metrics_logger(
    resolved: Resolved,
    run: RunFolder,
    member: Member,
    state: TrainerState,
    phase: Callable[[str], AbstractContextManager[None]],
) -> MetricsLogger:
    # The line of a step whose evaluation is due has not been written, or is written again.
    written = state.step if state.unevaluated is None else state.step - 1
    watch = Watch(run.path, resolved.config, written, member.log, run.read_metrics())

    def on_step(line: dict[str, float]) -> None:
        member.notify(StepMetrics(line))
        watch.add(line)

    metrics_logger = MetricsLogger(
        run.metrics,
        written,
        trackers=[selection.build() for selection in resolved.config.trackers],
        hooks=[resolved.plugins.events],
        on_step=on_step,
        on_note=watch.note,
        phase=phase,
        log=member.log,
    )
    resolved.plugins.events.log = member.log
    resolved.plugins.events.on_silenced = watch.note_now
    metrics_logger.start_trackers(run.path, resolved.config.model_dump(mode="json"))
    return metrics_logger


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # unbuffered: Python's standard error is written line by line
