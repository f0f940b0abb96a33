"""The plan of a run: what would be started, with which shapes and sizes. Checks what can be checked without torch."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.config import Settings
from areal_core.config.needs import roles_of
from areal_core.config.problems import dotted
from areal_core.config.selection import selections
from areal_core.disk import is_folder
from areal_core.driver.fingerprints import data_record
from areal_core.driver.groups import process_groups
from areal_core.driver.room import room_of
from areal_core.errors import ConfigError, RunError
from areal_core.interfaces.dataset import name_row, notes_of
from areal_core.interfaces.model import ELEMENT_BYTES, Estimate
from areal_core.models.sizes import text_config
from areal_core.runs.models import MODEL_FILES, model_path, model_paths, models_by_role, read_model
from areal_core.runtime.status import spans

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.launcher import ProcessGroup
    from areal_core.interfaces.model import StoredModel
    from areal_core.plugins import Provenance

    _Models = dict[str, StoredModel | None]

TOKENIZER_PARTS = ("token", "vocab", "spiece", "merges")
"""Words in the names of the files that a tokenizer is read from; one of them is there, whatever its kind."""
ON_HUB = "on the Hugging Face hub: a run downloads it before it starts anything"
FIRST_ROWS = 3
"""Of each data set, which are looked at before a run: rows of another form are so from the first."""
KEYS_S = 1.0
"""Time for looking through rows of a data set for missing keys, in seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would be.

    Attributes:
        rows: labels, and what there is to say.
        figures: numbers for programs: `parameters`, `weight_sync` (bytes), and those of the engines, such as `memory`.
        data: the data sets, see `areal_core.driver.fingerprints`.
        models: those that the config names, by its key; None where nobody has looked into one.
    """

    rows: list[tuple[str, str]]
    figures: dict[str, Any]
    data: list[Provenance] = field(default_factory=list)
    models: Mapping[str, StoredModel | None] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What is no mistake and yet worth a look, in the config and in how the rows differ from their sources."""
        return [text for label, text in self.rows if label == "note"]

    def __str__(self) -> str:
        return "\n".join(["plan", *(f"  {label:14s} {text}" for label, text in self.rows)])

    def to_json(self) -> str:
        """One object: `rows`, and each figure by its name."""
        return json.dumps({"rows": self.rows, **self.figures}, indent=2)


class RowCheck(Protocol):
    """A check of the code behind a config, which also sees the keys of rows by data set; see `_dataset_rows`."""

    def problems(self, rows: Mapping[str, Mapping[str, str]]) -> Sequence[str]:
        """Return everything that is wrong."""

    def plan_rows(self, rows: Mapping[str, Collection[str]]) -> Iterable[tuple[str, str]]:
        """Yield what else the plan shall show, as labels and texts; called after `problems`."""


def make_plan(
    resolved: Resolved,
    check: RowCheck | None = None,
    *,
    trains: bool = True,
    loads_model: bool = True,
    downloads: bool = True,
    run_dir: Path | None = None,
) -> Plan:
    """Check model, data, arithmetic and memory, and describe the run.

    Args:
        resolved: the config.
        check: asked last, of the keys of the first rows by data set.
        trains: whether there will be a trainer, for which there must be memory.
        loads_model: whether anything of the run loads the model; else nobody looks for it.
        downloads: models that the config names on the hub, to look at them as at any other; else only whether they are
            there.
        run_dir: the run's folder, whose disk must have room for a checkpoint and the exported model; None: not checked.

    Raises:
        ConfigError: the model or the data set cannot be read, the data set is empty, tokens exceed the context, or a
            rank of the trainer does not fit on its GPU.
    """
    config = resolved.config
    problems: list[str] = []
    figures: dict[str, Any] = {}
    stored = _stored_models(resolved, problems, MODEL_FILES if downloads else ["config.json"]) if loads_model else {}
    model = _model_rows(config, stored, problems, figures, trains=trains, run_dir=run_dir) if loads_model else []
    data: list[Provenance] = []
    notes = [*resolved.notes, *config.cross_notes()]
    rows, keys = _dataset_rows(resolved, problems, data if trains else None, notes)
    if getattr(getattr(config.workflow, "settings", None), "scores_answers", False) and not config.rewards:
        problems.append("rewards: the workflow scores every answer, and there are none: set rewards")
    groups = process_groups(config, Path()) if trains else []
    if check is not None:
        problems += [problem for problem in check.problems(keys) if not any(problem in known for known in problems)]
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)
    plan_rows = [("plugins", ", ".join(record.name for record in resolved.provenance()))]
    plan_rows += [*_group_rows(groups), *model, ("data", f"{config.dataset.reference}: {rows:,} rows")]
    plan_rows += _work_rows(config, rows)
    plan_rows += (("note", note) for note in notes)
    plan_rows += check.plan_rows(keys) if check is not None else ()
    figures["groups"] = [
        {name: getattr(group, name) for name in ("name", "role", "count", "gpus_each", "gpus", "end", "shares_gpus")}
        for group in groups
    ]
    return Plan(plan_rows, figures, data, stored)


def check_model(resolved: Resolved, made: Path | None = None, run_dir: Path | None = None) -> None:
    """Look at the model's folder, where it is there, and load nothing.

    Args:
        resolved: the config.
        made: where the config's source has made the model.
        run_dir: as in `make_plan`.

    Raises:
        ConfigError: something is wrong with the model, or the config cannot work with it.
    """
    problems: list[str] = []
    stored = _stored_models(resolved, problems, (), made)
    _model_rows(resolved.config, stored, problems, {}, trains=False, run_dir=run_dir)
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
        alone = sorted(set(named))
        which = f" ({spans(alone)}{', several on one' if len(alone) < len(named) else ''})" if named else ""
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


def _stored_models(resolved: Resolved, problems: list[str], files: Sequence[str], made: Path | None = None) -> _Models:
    """The models that the config names, by key; see `_stored`."""
    named = model_paths(resolved.config, made).items()
    return {key: _stored(resolved, problems, files, key, path) for key, path in named}


def _model_rows(
    config: RunConfig,
    stored: _Models,
    problems: list[str],
    figures: dict[str, Any],
    *,
    trains: bool,
    run_dir: Path | None = None,
) -> list[tuple[str, str]]:
    shared = stored.get("model.path")
    if trains:
        problems += _quantized(stored)
    if shared is None:
        made = (source := config.model.source) and f"made by {source.reference} before the run starts"
        return [("model", made or f"{config.model.path}, {ON_HUB}")]
    _check_context(config, shared.description, problems)
    for path, chosen in selections(config):
        seen = stored.get(f"roles.{path[1]}.path") if path[0] == "roles" else None
        if isinstance(chosen.settings, Settings):
            problems += (f"{dotted(path)}: {told}" for told in chosen.settings.check_model(config, seen or shared))
    if not any(part in file.name for file in shared.folder.iterdir() for part in TOKENIZER_PARTS):
        problems.append(f"model.path: {shared.folder} holds no tokenizer; save one there with save_pretrained")
    count = sum(map(math.prod, shared.shapes.values()))
    figures["parameters"] = count
    models = models_by_role(config, stored)
    rows = [("model", f"{shared.folder}: {shared.description.get('model_type')}, {count / 1e6:,.1f} M parameters")]
    rows += [(key, ON_HUB) for key, found in stored.items() if found is None]
    trainer = Estimate()
    if isinstance(config.train_engine.settings, Settings):
        try:
            trainer = config.train_engine.settings.estimate(config, models)
        except RunError as error:
            problems.append(": ".join(("train_engine", error.message, *error.hints)))
            return rows
    servers, engine = Estimate(), config.inference_engine and config.inference_engine.settings
    if isinstance(engine, Settings) and not trainer.misfits:
        servers = engine.plan_memory(config, trainer, shared)
    for key, estimate in (("train_engine", trainer), ("inference_engine", servers)):
        problems += (f"{key}: {misfit}" for misfit in estimate.misfits if trains)
        figures.update(estimate.figures)
        rows += estimate.rows
    if run_dir is not None:
        room = room_of(config, run_dir, trainer.checkpoint_bytes, ELEMENT_BYTES[config.model.dtype] * count)
        figures["disk"] = asdict(room)
        problems += filter(None, [room.problem])
        rows += [("disk", room.row), *(("note", note) for note in filter(None, [room.note]))]
    return [*rows, *_weight_sync_rows(config, shared, figures)]


def _quantized(stored: _Models) -> Iterator[str]:
    """The models whose weights are quantized, each with what to do about it."""
    from areal_core.models.quantization import refuse_quantized

    for key, found in stored.items():
        try:
            if found is not None:
                refuse_quantized(str(found.folder), found.description, found.shapes)
        except RunError as error:
            yield f"{key}: {error.message}; {'; '.join(error.hints)}"


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


def _stored(resolved: Resolved, problems: list[str], files: Sequence[str], key: str, path: str) -> StoredModel | None:
    """What a folder says of its model; None where something is wrong, or not all of it is wanted of the hub: of a
    name there `files` are downloaded, and without any nobody asks for it."""
    if not files and not is_folder(resolved.base_dir / path):  # a config may be checked where its model is not
        return None
    try:
        folder = Path(model_path(resolved, path, key, files))
    except RunError as error:
        problems.append(": ".join((error.message, *error.hints)))
        return None
    if files != MODEL_FILES and not is_folder(resolved.base_dir / path):
        return None
    try:
        return read_model(folder)
    except RunError as error:
        hints = error.hints or ("copy or download the model again, or save it with save_pretrained",)
        problems.append(f"{key}: {'; '.join((error.message, *hints))}")
        return None


def _check_context(config: RunConfig, description: Mapping[str, Any], problems: list[str]) -> None:
    context = description.get("max_position_embeddings")
    tokens = config.sampling.max_new_tokens
    if config.inference_engine is not None and isinstance(context, int) and tokens >= context:
        problems.append(
            f"sampling.max_new_tokens: {tokens} leaves no room for a prompt in the model's context of {context} tokens"
        )
    size = text_config(description).get("vocab_size", math.inf)
    if beyond := [token for token in config.sampling.stop_token_ids if not 0 <= token < size]:
        problems.append(f"sampling.stop_token_ids: {beyond} are no tokens of the model, which has {size:,}")


def spread(count: int) -> Iterator[int]:
    """Yield all indices below `count` once: the first ones, then ever finer steps over the whole range."""
    seen = set(range(min(count, FIRST_ROWS)))
    yield from sorted(seen)
    step = count
    while step > 1:
        step = -(-step // 2)
        for index in range(step - 1, count, step):
            if index not in seen:
                seen.add(index)
                yield index


def _dataset_rows(
    resolved: Resolved, problems: list[str], records: list[Provenance] | None, notes: list[str]
) -> tuple[int, dict[str, dict[str, str]]]:
    """Length of the data set, and by data set the keys of its rows, each with the name of a row without it, if one is
    found. Building it is the check that it can be read; the workflow sees its first rows."""
    settings = getattr(resolved.config.workflow, "settings", None)
    keys: dict[str, dict[str, str]] = {}
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
            own_notes = notes_of(dataset)
            notes += (f"{key}: {note}" for note in own_notes)
            known: dict[str, str] = {}
            deadline = time.monotonic() + KEYS_S
            for seen, index in enumerate(spread(rows)):
                if seen >= FIRST_ROWS and time.monotonic() > deadline:
                    break
                row = dataset[index]
                if seen < FIRST_ROWS and (wrong := check(row)):
                    raise ConfigError(f"{name_row(dataset, index)} {wrong}", hints=own_notes)
                known |= {name: name_row(dataset, 0) if seen else "" for name in row if name not in known}
                known |= {name: name_row(dataset, index) for name in known if not known[name] and name not in row}
            keys[key] = known
            if records is not None:
                records.append(data_record(key, selection.reference, dataset))
        except ConfigError as error:
            problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
        except Exception as error:  # noqa: BLE001 - a data set is anybody's code
            problems.append(f"{key}: {selection.reference} cannot be read: {type(error).__name__}: {error}")
        else:
            if not rows:
                problems.append(f"{key}: {selection.reference} is empty; it must have at least one row")
    return rows, keys
