"""The plan of a run: what would be started, with which shapes and sizes. Checks what can be checked without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import Settings
from areal_core.config.needs import roles_of
from areal_core.config.problems import dotted
from areal_core.config.selection import selections
from areal_core.disk import is_folder
from areal_core.driver.describing import spans
from areal_core.driver.groups import process_groups
from areal_core.driver.stored_model import read_shapes
from areal_core.errors import ConfigError, RunError
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.model import StoredModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.launcher import ProcessGroup

SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers")
"""Keys of a config.json that are numbers where they are there."""
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
"""Those that may be null."""
TOKENIZER_PARTS = ("token", "vocab", "spiece", "merges")
"""Words in the names of the files that a tokenizer is read from; one of them is there, whatever its kind."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FIRST_ROWS = 3
"""Of each data set, which are looked at before a run: rows of another form are so from the first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would be.

    Attributes:
        rows: labels, and what there is to say.
        figures: numbers for programs: `parameters`, `weight_sync` (bytes), and those of the engines, such as `memory`.
    """

    rows: list[tuple[str, str]]
    figures: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(["plan", *(f"  {label:14s} {text}" for label, text in self.rows)])

    def to_json(self) -> str:
        """One object: `rows`, and each figure by its name."""
        return json.dumps({"rows": self.rows, **self.figures}, indent=2)


def make_plan(
    resolved: Resolved, others: Callable[[], Sequence[str]] = tuple, *, trains: bool = True, loads_model: bool = True
) -> Plan:
    """Check model, data, arithmetic and memory, and describe the run.

    Args:
        resolved: the config.
        others: what somebody else finds wrong, asked last and told together with the rest.
        trains: whether there will be a trainer, for which there must be memory.
        loads_model: whether anything of the run loads the model; else nobody looks for it.

    Raises:
        ConfigError: the model or the data set cannot be read, the data set is empty, tokens exceed the context, or a
            rank of the trainer does not fit on its GPU.
    """
    config = resolved.config
    problems: list[str] = []
    figures: dict[str, Any] = {}
    seen = _shared(resolved, problems) if loads_model else None
    model = _model_rows(resolved, seen, problems, figures, trains=trains) if loads_model else []
    rows = _dataset_rows(resolved, problems)
    groups = process_groups(config, Path()) if trains else []
    problems += [told for told in others() if not any(told in known for known in problems)]
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)
    told = [("plugins", ", ".join(record.name for record in resolved.provenance()))]
    data = ("data", f"{config.dataset.reference}: {rows:,} rows")
    told += [*_group_rows(groups), *model, data, *_work_rows(config, rows)]
    figures["groups"] = [
        {name: getattr(group, name) for name in ("name", "role", "count", "gpus_each", "gpus", "end", "shares_gpus")}
        for group in groups
    ]
    return Plan([*told, *(("note", note) for note in config.cross_notes())], figures)


def check_model(resolved: Resolved, made: Path | None = None) -> None:
    """Look at the model's folder, where it is there, and load nothing.

    Args:
        resolved: the config.
        made: where the config's source has made the model.

    Raises:
        ConfigError: something is wrong with the model, or the config cannot work with it.
    """
    problems: list[str] = []
    if made or (resolved.config.model.path and is_folder(resolved.base_dir / resolved.config.model.path)):
        seen = _shared(resolved, problems, made)
        _model_rows(resolved, seen, problems, {}, trains=False)
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)


def _group_rows(groups: Sequence[ProcessGroup]) -> Iterator[tuple[str, str]]:
    """The process groups, those that are alike together."""
    like: dict[tuple[Any, ...], list[ProcessGroup]] = {}
    for group in groups:
        like.setdefault((group.role, group.gpus_each, group.shares_gpus, group.end), []).append(group)
    for number, ((role, gpus, shares, end), same) in enumerate(like.items()):
        count = sum(group.count for group in same)
        each = f", {gpus} GPU(s) each" if gpus else ""
        named = [gpu for group in same for gpu in group.gpus or ()]
        which = f" ({spans(named)})" if named else ""
        message = f"{count} x {role}{each}{which}{', colocated' if shares else ''}; the end of one {end}"
        yield "" if number else "groups", message


def _work_rows(config: RunConfig, rows: int) -> Iterator[tuple[str, str]]:
    """Roles, batches and steps."""
    roles = roles_of(config.algorithm, config.training.updates).values()
    if len(roles) > 1:
        models = [f"{one.name} ({'learns' if one.trains else 'EMA' if one.ema else 'frozen'})" for one in roles]
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
    yield "epochs", f"{config.steps * rollout.batch_size / max(1, rows):.2f} over {config.steps} steps"


def _shared(resolved: Resolved, problems: list[str], made: Path | None = None) -> StoredModel | None:
    """The model of all roles that have none of their own, where its folder is there."""
    model = resolved.config.model
    if model.source is not None and made is None:
        return None
    return _stored(made or resolved.base_dir / (model.path or ""), model.path or "", "model.path", problems)


def _model_rows(
    resolved: Resolved, shared: StoredModel | None, problems: list[str], figures: dict[str, Any], *, trains: bool
) -> list[tuple[str, str]]:
    config = resolved.config
    model, paths = config.model, {name: getattr(chosen.common, "path", None) for name, chosen in config.roles.items()}
    own = {
        name: _stored(resolved.base_dir / path, path, f"roles.{name}.path", problems)
        for name, path in paths.items()
        if path
    }
    if shared is None and model.source is not None:
        return [("model", f"made by {model.source.reference} before the run starts")]
    if shared is None:
        return [("model", f"{model.path} (from the Hugging Face hub)")]
    _check_context(resolved, shared.description, problems)
    for path, chosen in selections(config):
        seen = own.get(str(path[1])) if path[0] == "roles" else None
        if isinstance(chosen.settings, Settings):
            problems += (f"{dotted(path)}: {told}" for told in chosen.settings.check_model(config, seen or shared))
    if not any(part in file.name for file in shared.folder.iterdir() for part in TOKENIZER_PARTS):
        problems.append(f"model.path: {shared.folder} holds no tokenizer; save one there with save_pretrained")
    count = sum(map(math.prod, shared.shapes.values()))
    figures["parameters"] = count
    text = f"{shared.folder}: {shared.description.get('model_type')}, {count / 1e6:,.1f} M parameters"
    roles = roles_of(config.algorithm, config.training.updates)
    models = {name: found for name in roles if (found := own.get(name, shared)) is not None}
    rows = [("model", text)]
    if isinstance(config.train_engine.settings, Settings):
        try:
            estimate = config.train_engine.settings.estimate(config, models)
        except RunError as error:
            problems.append(": ".join(("train_engine", error.message, *error.hints)))
            return rows
        problems += (f"train_engine: {told}" for told in estimate.misfits if trains)
        figures.update(estimate.figures)
        rows += estimate.rows
    return [*rows, *_weight_sync_rows(config, shared, figures)]


def _weight_sync_rows(config: RunConfig, model: StoredModel, figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is sent after each step."""
    if config.inference_engine is None:
        return
    element = ELEMENT_BYTES[config.model.dtype]
    sizes = [element * math.prod(shape) for shape in model.shapes.values()]
    figures["weight_sync"] = {"bytes": sum(sizes), "largest_tensor": max(sizes)}
    by = config.weight_sync.transport.target.removeprefix("core/")
    size = f"{sum(sizes) / 1e9:.2f} GB in {config.model.dtype}, the largest tensor {max(sizes) / 1e9:.2f} GB"
    yield "weight sync", f"{size}, by {by}"


def _stored(folder: Path, path: str, key: str, problems: list[str]) -> StoredModel | None:
    """What a folder says of its model; None where `path` is a name on the hub, or something is wrong."""
    if not is_folder(folder):
        if path and (path.startswith((".", "/", "~")) or path.count("/") != 1):
            problems.append(f"{key}: there is no folder {folder}; name a Hugging Face folder or a name on the hub")
        return None
    try:
        if not (folder / "config.json").is_file():
            raise OSError("there is no such file")
        description = json.loads((folder / "config.json").read_text())
        wrong = "" if isinstance(description, dict) else "it is not a mapping"
    except (OSError, ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        problems.append(f"{key}: {folder / 'config.json'} cannot be read ({wrong}); a Hugging Face folder has one")
        return None
    text = description.get("text_config", description)
    sizes = text if isinstance(text, dict) else dict.fromkeys(SIZES)
    odd = [name for name in SIZES if not _is_size(sizes.get(name, 1))]
    odd += [name for name in OPTIONAL_SIZES if sizes.get(name) is not None and not _is_size(sizes[name])]
    if odd:
        problems.append(f"{key}: in {folder / 'config.json'} no positive whole number: {', '.join(odd)}")
        return None
    try:
        shapes = read_shapes(folder)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, AttributeError) as error:
        problems.append(f"{key}: the *.safetensors of {folder} cannot be read ({error}); save the model again")
        return None
    if not shapes:
        problems.append(f"{key}: {folder} holds no *.safetensors; save the model with save_pretrained")
        return None
    return StoredModel(folder, description, shapes)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _check_context(resolved: Resolved, description: Mapping[str, Any], problems: list[str]) -> None:
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
                    f"{selection.reference} is not a data set: it has no __len__ and __getitem__",
                    hints=["name a class that has both; its settings are the arguments of its __init__"],
                )
            rows = len(dataset)
            for index in range(min(rows, FIRST_ROWS)):
                row = dataset[index]
                if wrong := check(row):
                    raise ConfigError(f"{name_row(dataset, index)} {wrong}")
        except ConfigError as error:
            problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
        except Exception as error:  # noqa: BLE001 - a data set is anybody's code
            problems.append(f"{key}: {selection.reference} cannot be read: {type(error).__name__}: {error}")
        else:
            if not rows:
                problems.append(f"{key}: {selection.reference} is empty; it must have at least one row")
    return rows
