"""The only place that composes the rollout half and the training half of a run.

`execute` is what `areal run` calls. Each process of the run is `python -m areal_core.runs.roles ROLE RUN_DIR`; it reads the
run folder's config, loads the same plugins in the same way, and builds the parts of its role.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.config import load_run
from areal_core.errors import ArealError, RunError
from areal_core.launchers.processes import end_with_parent
from areal_core.runs.supervision import INTERRUPTED_EXIT_CODE, execute, write_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces import BatchSource, InferenceEngine, ModelReference, SamplingParameters, TrainEngine
    from areal_core.interfaces.source import BroadcastTarget
    from areal_core.rollout.controller import RolloutPolicy
    from areal_core.training.publication import Publisher

__all__ = ["execute", "main"]

SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""Names the run's private folder for sockets and published weights, in memory where the machine offers that."""


def main(arguments: Sequence[str]) -> int:
    """Run one process of a run: ROLE RUN_DIR PARENT_PID."""
    role, run_dir = arguments[0], Path(arguments[1])
    end_with_parent(int(arguments[2]))
    roles = {"prepare": prepare_model, "controller": run_controller, "trainer": run_trainer}
    try:
        return roles[role](run_dir)
    except ArealError as error:
        write_error(run_dir, error)
        return error.exit_code


def prepare_model(run_dir: Path) -> int:
    """Make or fetch the model's folder where the config names a source, and note where it lies."""
    source = load_run(run_dir).config.model.source
    assert source is not None
    cache = Path(os.environ.get("AREAL_CACHE", Path.home() / ".cache" / "areal"))
    cache.mkdir(parents=True, exist_ok=True)
    folder = source.build().prepare(cache)
    (run_dir / "model_folder.txt").write_text(str(folder))
    return 0


def model_reference(resolved: Resolved, run_dir: Path) -> ModelReference:
    """The model that every process of the run loads."""
    from areal_core.interfaces import ModelReference

    model = resolved.config.model
    if model.path is None:
        path = (run_dir / "model_folder.txt").read_text()
    else:
        local = resolved.base_dir / model.path
        path = str(local) if local.is_dir() else model.path
    return ModelReference(path, model.dtype, model.trust_remote_code)


def load_tokenizer(model: ModelReference) -> Any:
    """The model's tokenizer.

    Raises:
        RunError: transformers is missing, or the folder holds no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RunError("reading a tokenizer needs transformers", hints=["pip install areal-hf"]) from error
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RunError(
            f"the model '{model.path}' has no readable tokenizer: {str(error).splitlines()[0]}",
            hints=["model.path must be a Hugging Face folder with tokenizer files, or a name on the hub"],
        ) from error


def sampling_parameters(config: RunConfig, tokenizer: Any, temperature: float | None = None) -> SamplingParameters:
    """The engine's settings from the config's; temperature 0 is greedy, stop tokens include the model's own."""
    from areal_core.interfaces import SamplingParameters

    section = config.sampling
    values = section.model_dump(exclude={"temperature", "stop_token_ids", "stop", "allow_mismatched_sampling"})
    ends = {*section.stop_token_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    chosen = section.temperature if temperature is None else temperature
    return SamplingParameters(
        temperature=chosen or 1.0,
        greedy=chosen == 0,
        stop_token_ids=tuple(sorted(ends)),
        stop=tuple(section.stop),
        **values,
    )


# The rollout half.


def run_controller(run_dir: Path) -> int:
    """The process of the rollout controller."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the trainer, after the last commit
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_serve_rollouts(run_dir, Path(os.environ[SCRATCH_VARIABLE])))
    return 0


async def _serve_rollouts(run_dir: Path, scratch: Path) -> None:
    from areal_core.rollout.controller import RolloutController
    from areal_core.rollout.episodes import EpisodeRunner
    from areal_core.rollout.evaluation import Evaluator
    from areal_core.ledger.store import Ledger
    from areal_core.rewards.pool import RewardPool
    from areal_core.data.sampler import PromptSampler
    from areal_core.rollout.samples import SampleLog
    from areal_core.rollout.service import RolloutService

    resolved = load_run(run_dir)
    config, rollout = resolved.config, resolved.config.rollout
    assert config.workflow is not None
    model = model_reference(resolved, run_dir)
    tokenizer = load_tokenizer(model)
    ledger = Ledger(run_dir)
    engine = build_engine(config, run_dir, scratch)
    scorer = RewardPool(run_dir, scratch, processes=rollout.reward_processes, timeout_s=rollout.reward_timeout_s)
    await asyncio.gather(engine.start(model), scorer.start())
    runner = EpisodeRunner(
        config.workflow.build(),
        engine,
        scorer,
        tokenizer,
        seed=config.seed,
        max_retries=rollout.max_retries,
        on_failure=ledger.failed,
    )
    dataset = config.dataset.build()
    controller = RolloutController(
        _rollout_policy(config),
        runner,
        engine,
        dataset,
        PromptSampler(len(dataset), config.seed, shuffle=config.shuffle),
        sampling_parameters(config, tokenizer),
        ledger,
        config.algorithm.build().filter,
        SampleLog(run_dir),
    )
    controller.restore(discard=config.deterministic)
    evaluator = None
    if config.evaluation is not None:
        evaluator = Evaluator(
            runner,
            config.evaluation.dataset.build(),
            sampling_parameters(config, tokenizer, config.evaluation.temperature),
            samples_per_prompt=config.evaluation.samples_per_prompt,
            limit=config.evaluation.limit,
        )
    try:
        await RolloutService(controller, engine, evaluator, run_dir).serve(scratch / "controller.sock")
    finally:
        await scorer.close()
        ledger.close()


def build_engine(config: RunConfig, run_dir: Path, scratch: Path) -> InferenceEngine:
    """The inference engine, not yet started.

    Raises:
        RunError: it cannot do what the rest of the config asks of it.
    """
    assert config.inference_engine is not None
    name = config.inference_engine.reference
    engine: InferenceEngine = config.inference_engine.build(
        scratch=scratch,
        log_dir=run_dir / "logs",
        run_dir=run_dir,
        gpus=config.placement.generation,
        deterministic=config.deterministic,
    )
    if config.publication.transport == "broadcast" and not engine.capabilities.broadcast:
        raise RunError(
            f"publication.transport is broadcast, and {name} receives none", hints=["set it to memory or disk"]
        )
    if config.placement.in_turns and not engine.capabilities.releases_memory:
        raise RunError(
            f"placement gives the same GPUs to both, and {name} as it is set keeps its memory",
            hints=["sglang: set memory_saver to true; vllm: sleep_mode; or give each its own GPUs"],
        )
    return engine


def _rollout_policy(config: RunConfig) -> RolloutPolicy:
    from areal_core.rollout.controller import RolloutPolicy
    from areal_core.rollout.staleness import StalenessBound

    section = config.rollout
    return RolloutPolicy(
        StalenessBound(section.batch_size, section.max_staleness, section.pipeline_depth),
        section.group_size,
        section.stale,
        section.incomplete_groups,
        section.max_consecutive_failures,
        section.episode_timeout_s,
        section.stall_timeout_s,
    )


# The training half.


def run_trainer(run_dir: Path) -> int:
    """The process of one rank of the trainer."""
    import torch
    import torch.distributed as dist

    interrupted = _Interruption()
    resolved = load_run(run_dir)
    config = resolved.config
    torch.manual_seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        finished = _train(resolved, run_dir, interrupted)
    finally:
        dist.destroy_process_group()
    return 0 if finished else INTERRUPTED_EXIT_CODE


def _train(resolved: Resolved, run_dir: Path, interrupted: _Interruption) -> bool:
    import torch.distributed as dist

    from areal_core.training.checkpoint import Committed
    from areal_core.training.journal import Journal
    from areal_core.training.loop import LoopSettings, Trainer

    config, is_first = resolved.config, dist.get_rank() == 0
    model = model_reference(resolved, run_dir)
    algorithm = config.algorithm.build()
    engines = _engines(config, model, needs_reference=algorithm.needs_reference)
    committed = Committed.find(run_dir)
    if committed is not None:
        engines["actor"].load(committed.folder)
    step = committed.step if committed else 0
    source = _source(resolved, run_dir, model, interrupted, rollouts=algorithm.needs_rollouts) if is_first else None
    publisher = _publisher(config, run_dir, engines["actor"], model, source) if algorithm.needs_rollouts else None
    trackers = [selection.build() for selection in config.trackers] if is_first else []
    journal = Journal(run_dir, config.steps, step, trackers, _log) if is_first else None
    if journal is not None:
        journal.start_trackers(run_dir, config.model_dump(mode="json"))
    evaluation = config.evaluation
    settings = LoopSettings(
        steps=config.steps,
        seed=config.seed,
        updates_per_batch=config.training.updates_per_batch,
        epochs_per_batch=config.training.epochs_per_batch,
        max_skipped_updates=config.training.max_skipped_updates,
        evaluate_every=evaluation.every if evaluation else 0,
        evaluate_at_start=evaluation.at_start if evaluation else False,
        keep_best=evaluation.keep_best if evaluation else False,
        checkpoint_every=config.checkpoint.every,
        checkpoints_kept=config.checkpoint.keep,
        export=config.checkpoint.export,
        shares_memory=config.placement.in_turns,
        verify_every=config.publication.verify_every,
        tolerance=config.publication.tolerance or (1e-3 if model.dtype == "float32" else 0.1),
    )
    trainer = Trainer(
        settings, algorithm, engines, publisher, run_dir, source, journal, resolved.plugins.events if is_first else None
    )
    try:
        return trainer.run(step, committed.witness() if committed else None)
    finally:
        if journal is not None:
            journal.finish("over")
        if source is not None:
            source.close()
        for engine in engines.values():
            engine.close()


def _publisher(
    config: RunConfig, run_dir: Path, actor: TrainEngine, model: ModelReference, source: BatchSource | None
) -> Publisher:
    import torch

    from areal_core.training.broadcast import Broadcaster
    from areal_core.training.publication import FolderPublisher

    settings, dtype = config.publication, getattr(torch, model.dtype)
    parent = run_dir if settings.transport == "disk" else Path(os.environ[SCRATCH_VARIABLE])
    folders = FolderPublisher(actor, parent / "weights", dtype, source)
    if source is not None:
        shutil.rmtree(parent / "weights", ignore_errors=True)  # of a run that was killed
    if settings.transport != "broadcast":
        return folders
    target = cast("BroadcastTarget | None", source)
    return Broadcaster(actor, folders, target, dtype, address=settings.address, timeout_s=settings.timeout_s)


def _engines(config: RunConfig, model: ModelReference, *, needs_reference: bool) -> dict[str, TrainEngine]:
    from areal_core.interfaces import OptimizerSettings, Role

    updates = config.steps * config.training.updates_per_batch * config.training.epochs_per_batch
    settings = OptimizerSettings(updates, config.sampling.temperature)
    engines = {"actor": config.train_engine.build()}
    engines["actor"].setup(model, Role.ACTOR, settings)
    if needs_reference:
        assert config.reference_model is not None
        engines["reference"] = config.train_engine.build()
        engines["reference"].setup(replace(model, path=config.reference_model.path), Role.REFERENCE, settings)
    return engines


def _source(
    resolved: Resolved, run_dir: Path, model: ModelReference, interrupted: _Interruption, *, rollouts: bool
) -> BatchSource:
    from areal_core.training.client import RolloutClient
    from areal_core.training.sources import RolloutSource, SupervisedSource

    config = resolved.config
    if rollouts:
        socket = Path(os.environ[SCRATCH_VARIABLE]) / "controller.sock"
        return RolloutSource(RolloutClient(socket, is_interrupted=interrupted, log=_log))
    return SupervisedSource(
        config.dataset.build(),
        load_tokenizer(model),
        config.rollout.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        run_dir=run_dir,
        is_interrupted=interrupted,
    )


class _Interruption:
    """Set by SIGTERM or SIGINT; the loop looks at it where it waits."""

    def __init__(self) -> None:
        self._seen = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._see)

    def _see(self, number: int, frame: object) -> None:
        self._seen = True

    def __call__(self) -> bool:
        return self._seen


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
