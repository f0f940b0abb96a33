"""The plan of a run: what would be started, with which shapes and sizes. Checks what can be checked without torch."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from areal_core.config.needs import roles_of
from areal_core.errors import ConfigError
from areal_core.interfaces.dataset import name_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.config import Resolved
    from areal_core.config.selection import Selection

BYTES_PER_PARAMETER = 16
"""Of the trainer in float32: parameter, gradient and two moments of AdamW."""
FIRST_ROWS = 3
"""Of each data set, which are looked at before a run: rows of another form are so from the first."""


def make_plan(resolved: Resolved, others: Callable[[], Sequence[str]] = tuple) -> str:
    """Check model, data and arithmetic, and describe the run.

    Args:
        resolved: the config.
        others: what somebody else finds wrong, asked last and told together with the rest.

    Raises:
        ConfigError: the model or the data set cannot be read, the data set is empty, or tokens exceed the context.
    """
    config = resolved.config
    problems: list[str] = []
    model = _model_lines(resolved, problems)
    rows = _dataset_rows(resolved, problems)
    problems += [told for told in others() if not any(told in known for known in problems)]
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)
    ranks = config.launcher.keywords().get("trainer_processes", 1)
    lines = ["plan", f"  plugins        {', '.join(record.name for record in resolved.provenance())}", *model]
    lines.append(f"  data           {config.dataset.reference}: {rows:,} rows")
    roles = roles_of(config.algorithm, config.training.updates).values()
    if len(roles) > 1:
        models = [
            f"{role.name} ({'learns' if role.trains else 'follows' if role.follows else 'frozen'})" for role in roles
        ]
        lines.append(f"  roles          {', '.join(models)}: a model each")
    rollout = config.rollout
    processes = f"{ranks} trainer rank{'s' if ranks > 1 else ''}"
    if config.inference_engine is not None:
        sequences = rollout.batch_size * rollout.group_size
        processes = f"1 controller, {rollout.reward_processes} reward, {_engines(config.inference_engine)}, {processes}"
        lines += [
            f"  batch          {rollout.batch_size} prompts x {rollout.group_size} episodes = {sequences} sequences, "
            f"{config.training.updates_per_batch * config.training.epochs_per_batch} update(s)",
            f"  staleness      at most {rollout.max_staleness} (policy {rollout.stale}), "
            f"{rollout.pipeline_depth} batches in the pipeline",
            f"  epochs         {config.steps * rollout.batch_size / max(1, rows):.2f} over {config.steps} steps",
        ]
    else:
        lines.append(f"  batch          {rollout.batch_size} examples, {config.steps} steps")
    lines.insert(2, f"  processes      {processes}")
    return "\n".join([*lines, *(f"  note           {note}" for note in config.cross_notes())])


def _engines(chosen: Selection) -> str:
    """The inference engine in words: servers are counted."""
    settings = chosen.keywords()
    if "servers" not in settings:
        return f"1 {chosen.reference}"
    elsewhere = len(settings.get("addresses", ()))
    return f"{settings['servers']} {chosen.reference} servers{f' and {elsewhere} elsewhere' if elsewhere else ''}"


def _model_lines(resolved: Resolved, problems: list[str]) -> list[str]:
    model = resolved.config.model
    for name, chosen in resolved.config.roles.items():
        if path := getattr(chosen.common, "path", None):
            _model_facts(resolved.base_dir / path, path, f"roles.{name}.path", problems)
    if model.source is not None:
        return [f"  model          made by {model.source.reference} before the run starts"]
    folder = resolved.base_dir / (model.path or "")
    description, weights = _model_facts(folder, model.path or "", "model.path", problems)
    if not description:
        return [f"  model          {model.path} (from the Hugging Face hub)"]
    _check_context(resolved, description, problems)
    stored = {"float16": 2, "bfloat16": 2}.get(str(description.get("dtype", description.get("torch_dtype"))), 4)
    parameters = weights // stored
    memory = parameters * BYTES_PER_PARAMETER
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"  model          {folder}: {description.get('model_type')}, about {parameters / 1e6:,.1f} M parameters",
        f"  memory         trainer about {memory / 2**30:.2f} GiB for parameters, gradients and moments; "
        f"this machine has {available / 2**30:.0f} GiB",
    ]


def _model_facts(folder: Path, path: str, key: str, problems: list[str]) -> tuple[dict[str, Any], int]:
    """What a folder's config.json says, and the bytes of its weights; nothing where `path` is a name on the hub."""
    if not folder.is_dir():
        if path and (path.startswith((".", "/", "~")) or path.count("/") != 1):
            problems.append(f"{key}: there is no folder {folder}; name a Hugging Face folder or a name on the hub")
        return {}, 0
    try:
        description: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        problems.append(f"{key}: {folder / 'config.json'} cannot be read ({error}); a Hugging Face folder has one")
        return {}, 0
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not weights:
        problems.append(f"{key}: {folder} holds no *.safetensors; save the model with save_pretrained")
    return description, weights


def _check_context(resolved: Resolved, description: dict[str, Any], problems: list[str]) -> None:
    context = description.get("max_position_embeddings")
    tokens = resolved.config.sampling.max_new_tokens
    if resolved.config.inference_engine is not None and isinstance(context, int) and tokens >= context:
        problems.append(
            f"sampling.max_new_tokens: {tokens} leaves no room for a prompt in the model's context of {context} tokens"
        )


def _dataset_rows(resolved: Resolved, problems: list[str]) -> int:
    """Length of the data set. Building it is the check that it can be read; the workflow sees its first rows."""
    settings = getattr(resolved.config.workflow, "settings", None)
    rows, check = 0, getattr(settings, "check_row", lambda _: "")
    chosen = [("dataset", resolved.config.dataset)]
    if resolved.config.evaluation is not None:
        chosen.append(("evaluation.dataset", resolved.config.evaluation.dataset))
    for key, selection in reversed(chosen):
        try:
            dataset = selection.build()
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                raise ConfigError(
                    f"{selection.reference} is no data set: it has no __len__ and __getitem__",
                    hints=["name a class that has both; its settings are the arguments of its __init__"],
                )
            rows = len(dataset)
            for index in range(min(rows, FIRST_ROWS)):
                if wrong := check(dataset[index]):
                    raise ConfigError(f"{name_row(dataset, index)} {wrong}")
        except ConfigError as error:
            problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
        except Exception as error:  # noqa: BLE001 - a data set is anybody's code
            problems.append(f"{key}: {selection.reference} cannot be read: {type(error).__name__}: {error}")
        else:
            if not rows:
                problems.append(f"{key}: {selection.reference} is empty; it must have at least one row")
    return rows
