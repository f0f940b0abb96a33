"""The plan of a run: groups of processes, models, memory, disk, batches and weight sync, as labels and texts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from areal_core.checks.disk_space import disk_space
from areal_core.checks.models import model_problems, quantized_problems
from areal_core.config import Settings
from areal_core.config.needs import roles_of
from areal_core.errors import RunError
from areal_core.interfaces.launcher import OnExit
from areal_core.interfaces.model import ELEMENT_BYTES, Estimate
from areal_core.runs.models import models_by_role
from areal_core.runtime.status import spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.launcher import ProcessGroup
    from areal_core.interfaces.model import StoredModel

_ON_EXIT: Final = {
    OnExit.END_ATTEMPT: "if one ends, the run starts again from its last checkpoint",
    OnExit.RESTART: "if one ends, it is restarted",
}
_ON_HUB: Final = "on the Hugging Face hub: a run downloads it before it starts anything"


@dataclass(slots=True)
class ModelPlan:
    """What a run needs for its models, and what of it is missing.

    Attributes:
        rows: labels and texts.
        figures: numbers for programs: `parameters`, `disk`, `weight_sync`, and those of the engines, such as `memory`.
        problems: each with its config key.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def plan_models(
    config: RunConfig, stored: Mapping[str, StoredModel | None], *, trains: bool = True, run_dir: Path | None = None
) -> ModelPlan:
    """Check a config against its models, and plan memory, disk space and weight sync.

    Args:
        config: of the run.
        stored: its models, by the config key that names each; None for a model that is not on this machine.
        trains: whether to refuse quantized weights, and engines that do not fit on their GPUs.
        run_dir: the run's folder, whose disk must have room for a checkpoint and the exported model; None: not checked.
    """
    plan = ModelPlan()
    if trains:
        plan.problems += quantized_problems(stored)
    model = stored.get("model.path")
    if model is None:
        source = config.model.source
        text = f"made by {source.reference} before the run starts" if source else f"{config.model.path}, {_ON_HUB}"
        plan.rows.append(("model", text))
        return plan
    plan.problems += model_problems(config, stored)
    count = sum(map(math.prod, model.shapes.values()))
    plan.figures["parameters"] = count
    kind = model.description.get("model_type")
    plan.rows.append(("model", f"{model.folder}: {kind}, {count / 1e6:,.1f} M parameters"))
    plan.rows += [(key, _ON_HUB) for key, other in stored.items() if other is None]
    try:
        trainer, servers = _estimates(config, stored, model)
    except RunError as error:
        plan.problems.append(": ".join(("train_engine", error.message, *error.hints)))
        return plan
    for key, estimate in (("train_engine", trainer), ("inference_engine", servers)):
        plan.problems += (f"{key}: {misfit}" for misfit in estimate.misfits if trains)
        plan.figures.update(estimate.figures)
        plan.rows += estimate.rows
    if run_dir is not None:
        _plan_disk(plan, config, run_dir, trainer.checkpoint_bytes, ELEMENT_BYTES[config.model.dtype] * count)
    if config.inference_engine is not None:
        _plan_weight_sync(plan, config, model)
    return plan


def _estimates(
    config: RunConfig, stored: Mapping[str, StoredModel | None], model: StoredModel
) -> tuple[Estimate, Estimate]:
    """Return what the train engine and the inference engine estimate.

    Raises:
        RunError: the train engine cannot train such a model with its settings.
    """
    trainer = servers = Estimate()
    if isinstance(config.train_engine.settings, Settings):
        trainer = config.train_engine.settings.estimate(config, models_by_role(config, stored))
    engine = config.inference_engine and config.inference_engine.settings
    if isinstance(engine, Settings) and not trainer.misfits:
        servers = engine.plan_memory(config, trainer, model)
    return trainer, servers


def _plan_disk(plan: ModelPlan, config: RunConfig, run_dir: Path, checkpoint_bytes: int, model_bytes: int) -> None:
    space = disk_space(config, run_dir, checkpoint_bytes, model_bytes)
    plan.figures["disk"] = asdict(space)
    plan.problems += filter(None, [space.problem])
    plan.rows += [("disk", space.row), *(("note", note) for note in filter(None, [space.note]))]


def _plan_weight_sync(plan: ModelPlan, config: RunConfig, model: StoredModel) -> None:
    element = ELEMENT_BYTES[config.model.dtype]
    sizes = [element * math.prod(shape) for shape in model.shapes.values()]
    plan.figures["weight_sync"] = {"bytes": sum(sizes), "largest_tensor": max(sizes)}
    transport = config.weight_sync.transport.target.removeprefix("core/")
    size = f"{sum(sizes) / 1e9:.2f} GB in {config.model.dtype}, the largest tensor {max(sizes) / 1e9:.2f} GB"
    plan.rows.append(("weight sync", f"{size}, by {transport}"))


def group_rows(groups: Sequence[ProcessGroup]) -> Iterator[tuple[str, str]]:
    """Yield a line for the process groups of each kind."""
    groups_by_kind: dict[tuple[Any, ...], list[ProcessGroup]] = {}
    for group in groups:
        groups_by_kind.setdefault((group.role, group.gpus_each, group.shares_gpus, group.on_exit), []).append(group)
    for number, ((role, gpus_each, shares, end), alike) in enumerate(groups_by_kind.items()):
        count = sum(group.count for group in alike)
        size = f", {gpus_each} GPU(s) each" if gpus_each else ""
        gpus = [gpu for group in alike for gpu in group.gpus or ()]
        several = ", several on one" if len(set(gpus)) < len(gpus) else ""
        places = f" ({spans(sorted(set(gpus)))}{several})" if gpus else ""
        text = f"{count} x {role}{size}{places}{', colocated' if shares else ''}; {_ON_EXIT[end]}"
        yield "" if number else "groups", text


def group_figures(groups: Sequence[ProcessGroup]) -> list[dict[str, Any]]:
    """Return the process groups for programs."""
    names = ("name", "role", "count", "gpus_each", "gpus", "shares_gpus")
    return [{name: getattr(group, name) for name in names} | {"end": group.on_exit} for group in groups]


def batch_rows(config: RunConfig, row_count: int) -> Iterator[tuple[str, str]]:
    """Yield lines for roles, batches and steps.

    Args:
        config: of the run.
        row_count: rows of the training data.
    """
    roles = roles_of(config.algorithm, config.training.updates).values()
    if len(roles) > 1:
        models = [f"{role.name} ({'learns' if role.trains else 'EMA' if role.ema else 'frozen'})" for role in roles]
        yield "roles", f"{', '.join(models)}: a model each"
    rollout = config.rollout
    if config.inference_engine is None:
        yield "batch", f"{rollout.batch_size} examples, {config.steps} steps"
        return
    yield (
        "batch",
        f"{rollout.batch_size} prompts x {rollout.group_size} episodes = {rollout.batch_size * rollout.group_size} "
        f"sequences, {config.training.updates} update(s)",
    )
    yield (
        "staleness",
        f"at most {rollout.max_staleness} (policy {rollout.stale}), {rollout.max_pending_batches} pending batches",
    )
    yield "epochs", f"{config.steps * rollout.batch_size / max(1, row_count):.2f} over {config.steps} steps"
