"""The plan of a run: what would be started, with which shapes and sizes. Checks what can be checked without torch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import Settings
from areal_core.config.needs import roles_of
from areal_core.config.problems import dotted
from areal_core.config.selection import selections
from areal_core.disk import is_folder
from areal_core.driver.describing import spans
from areal_core.driver.groups import process_groups
from areal_core.driver.memory import BYTES_PER_S, ELEMENT_BYTES, GIB, MemoryPlan, gpu_bytes_of, read_shapes
from areal_core.errors import ConfigError, RunError
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.model import StoredModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from areal_core.config import Resolved, RunConfig
    from areal_core.config.selection import Selection
    from areal_core.interfaces.launcher import ProcessGroup

SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers")
"""Keys of a config.json that are numbers where they are there."""
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
"""Those that may be null."""
TOKENIZER_PARTS = ("token", "vocab", "spiece", "merges")
"""Words in the names of the files that a tokenizer is read from; one of them is there, whatever its kind."""
PICTURE_KEYS = ("image", "images")
TEXT_WORKFLOW = "core/single_turn"
UNSHOWN = "choose workflow: vision/single_turn (areal-vision), or take the pictures out of the data"
FIRST_ROWS = 3
"""Of each data set, which are looked at before a run: rows of another form are so from the first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would be.

    Attributes:
        rows: labels, and what there is to say.
        figures: numbers for programs: `parameters`, `memory` (bytes) and `weight_sync` (bytes, seconds), where known.
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
    rows = _dataset_rows(resolved, problems, seen)
    groups = process_groups(config, Path()) if trains else []
    problems += _unfit(config)
    problems += [told for told in others() if not any(told in known for known in problems)]
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)
    told = [("plugins", ", ".join(record.name for record in resolved.provenance())), ("processes", _processes(config))]
    data = ("data", f"{config.dataset.reference}: {rows:,} rows")
    told += [*_group_rows(groups), *model, data, *_work_rows(config, rows)]
    figures["groups"] = [
        {name: getattr(group, name) for name in ("name", "role", "count", "gpus_each", "gpus", "end", "shares_gpus")}
        for group in groups
    ]
    return Plan([*told, *(("note", note) for note in config.cross_notes())], figures)


def check_model(resolved: Resolved, made: Path | None = None) -> None:
    """Look at the model's folder, where it is there, and load nothing; of one that was made, at the first rows too.

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
        if made and seen and _sees(seen):
            _dataset_rows(resolved, problems, seen)
    if problems:
        raise ConfigError("the run cannot start", problems=problems, hints=problems)


def _processes(config: RunConfig) -> str:
    ranks = config.trainer_processes
    trainer = f"{ranks} trainer rank{'s' if ranks > 1 else ''}"
    if config.inference_engine is None:
        return trainer
    workers = f"{config.rollout.workers} rollout worker(s), " if config.rollout.workers else ""
    rewards = f"{config.rollout.reward_processes} reward"
    return f"1 controller, {workers}{rewards}, {_engines(config.inference_engine)}, {trainer}"


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
        told = f"{count} x {role}{each}{which}{', colocated' if shares else ''}; the end of one {end}"
        yield "" if number else "groups", told


def _unfit(config: RunConfig) -> Iterator[str]:
    """GPUs that are named, and are too few."""
    placement, engine = config.placement, config.inference_engine
    if placement.training is not None and config.trainer_processes > len(placement.training):
        yield f"placement: {config.trainer_processes} ranks do not fit on {len(placement.training)} GPUs"
    settings = engine.keywords() if engine is not None else {}
    if isinstance(servers := settings.get("servers"), int) and placement.generation is not None:
        each = settings.get("tensor_parallel", 1) * settings.get("data_parallel", 1)
        if servers * each > len(placement.generation):
            yield (
                f"placement: {servers} servers on {each} GPUs each need {servers * each}; placement.generation names "
                f"{len(placement.generation)}"
            )


def _work_rows(config: RunConfig, rows: int) -> Iterator[tuple[str, str]]:
    """Roles, batches and steps."""
    roles = roles_of(config.algorithm, config.training.updates).values()
    if len(roles) > 1:
        models = [f"{one.name} ({'learns' if one.trains else 'follows' if one.follows else 'frozen'})" for one in roles]
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


def _engines(chosen: Selection) -> str:
    """The inference engine in words: servers are counted."""
    settings = chosen.keywords()
    if "servers" not in settings:
        return f"1 {chosen.reference}"
    elsewhere = len(settings.get("addresses", ()))
    return f"{settings['servers']} {chosen.reference} servers{f' and {elsewhere} elsewhere' if elsewhere else ''}"


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
    try:
        memory = MemoryPlan(config, models, gpu_bytes_of(config))
    except RunError as error:
        problems.append(": ".join(("train_engine", error.message, *error.hints)))
        return [("model", text)]
    problems += memory.problems() if trains else ()
    figures["memory"] = memory.as_dict()
    return [("model", text), *_memory_rows(memory), *_weight_sync_rows(config, shared, memory, figures)]


def _memory_rows(memory: MemoryPlan) -> Iterator[tuple[str, str]]:
    """What a rank holds, part by part for each role, and where."""
    if not memory.roles:
        yield "memory", "not known: config.json lacks sizes, the model sees pictures, or the engine does not tell"
        return
    for role in memory.roles:
        yield "memory", memory.parts(role)
    if memory.gpu_bytes is None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        place = f"this machine has {machine / GIB:.0f} (placement.gpu_memory_gib plans for GPUs elsewhere)"
    else:
        place = f"its GPU has {memory.gpu_bytes / GIB:.1f}, of which CUDA itself takes some"
    yield "", f"{memory.peak / GIB:.1f} GiB for each of {memory.ranks} rank(s) in all; {place}"


def _weight_sync_rows(
    config: RunConfig, model: StoredModel, memory: MemoryPlan, figures: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is sent after each step, and what servers have beside a trainer that stays."""
    if config.inference_engine is None:
        return
    element = ELEMENT_BYTES[config.model.dtype]
    sizes = [element * math.prod(shape) for shape in model.shapes.values()]
    total, rate = sum(sizes), BYTES_PER_S.get(config.weight_sync.transport.target)
    goes_out = config.placement.disaggregated and not config.launcher.target.startswith(
        ("core/local", "areal_core.launchers.local")
    )
    if memory.gpu_bytes is None or goes_out:
        rate = None
    figures["weight_sync"] = {"bytes": total, "largest_tensor": max(sizes), "seconds": total / rate if rate else None}
    told = f"{total / 1e9:.2f} GB in {config.model.dtype}, the largest tensor {max(sizes) / 1e9:.2f} GB"
    by = f" by {config.weight_sync.transport.target.removeprefix('core/')}"
    if rate is not None:
        told += f", about {total / rate:.2g} s{by} at {rate / 1e9:g} GB/s within one machine (as on H200s)"
    elif memory.gpu_bytes is not None and goes_out:
        told += f",{by} between nodes: how long that takes, their network decides"
    yield "weight sync", told
    if config.placement.colocated and memory.gpu_bytes is not None:
        left = (memory.gpu_bytes - memory.resident) / GIB
        yield "in turns", f"the trainer keeps {memory.resident / GIB:.1f} GiB while servers generate in {left:.1f} GiB"


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
        wrong = "" if isinstance(description, dict) else "it is no mapping"
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


def _sees(model: StoredModel) -> bool:
    return model.description.get("vision_config") is not None


def _picture_key(row: Mapping[str, Any]) -> str:
    """Where a row has its picture; empty where it has none, for other things are called images as well."""
    found = {key: row.get(key) for key in PICTURE_KEYS}
    parts = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    return next((key for key, values in parts.items() if any(map(_is_picture, values))), "")


def _is_picture(value: Any) -> bool:
    if isinstance(value, dict):  # as Hugging Face's data sets store them
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return value.startswith("data:image") or (guess_type(value)[0] or "").startswith("image/")
    return isinstance(value, bytes) or hasattr(value, "convert")


def _dataset_rows(resolved: Resolved, problems: list[str], model: StoredModel | None) -> int:
    """Length of the data set. Building it is the check that it can be read; the workflow sees its first rows."""
    settings = getattr(resolved.config.workflow, "settings", None)
    rows, check = 0, getattr(settings, "check_row", lambda _: "")
    is_blind = model and _sees(model) and getattr(resolved.config.workflow, "target", "") == TEXT_WORKFLOW
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
                row = dataset[index]
                wrong = check(row)
                if is_blind and not wrong and (shown := _picture_key(row)):
                    wrong = f"has a picture ('{shown}'), the model sees, and the workflow shows it none: {UNSHOWN}"
                if wrong:
                    raise ConfigError(f"{name_row(dataset, index)} {wrong}")
        except ConfigError as error:
            problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
        except Exception as error:  # noqa: BLE001 - a data set is anybody's code
            problems.append(f"{key}: {selection.reference} cannot be read: {type(error).__name__}: {error}")
        else:
            if not rows:
                problems.append(f"{key}: {selection.reference} is empty; it must have at least one row")
    return rows
