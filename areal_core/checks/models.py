"""Checks the models of a config by config.json and the headers of their weights. Loads nothing, imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.config import Settings
from areal_core.config.problems import dotted
from areal_core.config.selection import selections
from areal_core.disk import WEIGHTS_INDEX, indexed_files, is_folder
from areal_core.errors import RunError
from areal_core.models.quantization import refuse_quantized
from areal_core.models.sizes import text_config
from areal_core.runs.models import MODEL_FILES, model_path, model_paths, read_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.config import Resolved, RunConfig, Selection
    from areal_core.config.problems import Path as KeyPath
    from areal_core.interfaces.model import StoredModel

_TOKENIZER_PARTS: Final = ("token", "vocab", "spiece", "merges")
"""Parts of the names of files that a tokenizer is read from. Every kind of tokenizer has one of them."""


def has_tokenizer_files(folder: Path) -> bool:
    """Return whether a model's folder has files of a tokenizer, whatever they hold."""
    return any(part in file.name for file in folder.iterdir() for part in _TOKENIZER_PARTS)


def _is_complete(folder: Path) -> bool:
    """Return whether a folder of the hub's cache has a tokenizer and all weights, and not only the files of a check.

    A download that was interrupted leaves an index that names missing files, or shards without an index.
    """
    if not (folder / WEIGHTS_INDEX).is_file():
        return has_tokenizer_files(folder) and (folder / "model.safetensors").is_file()
    try:
        return has_tokenizer_files(folder) and bool(indexed_files(folder))
    except RunError:
        return False


class StoredModels:
    """The models that a config names, as far as they are on this machine.

    Args:
        resolved: the config.
        files: patterns of the files to download for a model that is named on the Hugging Face hub. Without all of
            `MODEL_FILES` such a model is read only if an earlier run has downloaded it; with none, the hub is not asked
            whether it exists.
        made: folder of the model that the config's source has made.

    Attributes:
        by_key: by the config key that names each; None for a model that is on the hub, or that cannot be read.
        problems: why models cannot be read, each with its config key.
    """

    def __init__(self, resolved: Resolved, files: Sequence[str] = (), made: Path | None = None) -> None:
        self.problems: list[str] = []
        self.by_key = {
            key: self._read(resolved, files, key, path) for key, path in model_paths(resolved.config, made).items()
        }

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of the models on this machine, by config key."""
        return {key: stored.folder for key, stored in self.by_key.items() if stored is not None}

    def _read(self, resolved: Resolved, files: Sequence[str], key: str, path: str) -> StoredModel | None:
        is_local = is_folder(resolved.base_dir / path)
        if not files and not is_local:  # a config may be checked on a machine that does not have the model
            return None
        try:
            folder = Path(model_path(resolved, path, key, files))
        except RunError as error:
            self.problems.append(": ".join((error.message, *error.hints)))
            return None
        if files != MODEL_FILES and not is_local and not _is_complete(folder):
            return None
        try:
            return read_model(folder)
        except RunError as error:
            hints = error.hints or ("copy or download the model again, or save it with save_pretrained",)
            self.problems.append(f"{key}: {'; '.join((error.message, *hints))}")
            return None


def model_problems(config: RunConfig, stored: Mapping[str, StoredModel | None]) -> Iterator[str]:
    """Yield what a config cannot do with its models. Each component's settings check the model that they use.

    Args:
        config: of the run.
        stored: its models, by the config key that names each. Nothing is checked without the run's own model.
    """
    model = stored.get("model.path")
    if model is None:
        return
    yield from _token_problems(config, model.description)
    for path, chosen in selections(config):
        yield from settings_problems(config, path, chosen, stored)
    if not has_tokenizer_files(model.folder):
        yield f"model.path: {model.folder} holds no tokenizer; save one there with save_pretrained"


def settings_problems(
    config: RunConfig, path: KeyPath, chosen: Selection, stored: Mapping[str, StoredModel | None]
) -> Iterator[str]:
    """Yield what the settings of one component cannot do with the run's model, or with that of their role."""
    model = stored.get(f"roles.{path[1]}.path") if path[0] == "roles" else None
    model = model or stored.get("model.path")
    if model is not None and isinstance(chosen.settings, Settings):
        yield from (f"{dotted(path)}: {line}" for line in chosen.settings.check_model(config, model))


def unread_problems(resolved: Resolved, paths: Sequence[KeyPath]) -> Iterator[str]:
    """Yield what settings that the driver has not read find wrong with the model.

    Args:
        resolved: the config.
        paths: of the components whose settings the driver has not read. It knows nothing of those below, either.
    """
    hidden = [
        (path, chosen)
        for path, chosen in selections(resolved.config)
        if any(path[: len(above)] == above for above in paths)
        and isinstance(chosen.settings, Settings)
        and type(chosen.settings).check_model is not Settings.check_model
    ]
    stored = StoredModels(resolved).by_key if hidden else {}
    for path, chosen in hidden:
        yield from settings_problems(resolved.config, path, chosen, stored)


def _token_problems(config: RunConfig, description: Mapping[str, Any]) -> Iterator[str]:
    context = description.get("max_position_embeddings")
    tokens = config.sampling.max_new_tokens
    if config.inference_engine is not None and isinstance(context, int) and tokens >= context:
        yield (
            f"sampling.max_new_tokens: {tokens} leaves no room for a prompt in the model's context of {context} tokens"
        )
    size = text_config(description).get("vocab_size", math.inf)
    if beyond := [token for token in config.sampling.stop_token_ids if not 0 <= token < size]:
        yield f"sampling.stop_token_ids: {beyond} are no tokens of the model, which has {size:,}"
    if config.sampling.top_logprobs > size:
        yield f"sampling.top_logprobs: {config.sampling.top_logprobs} is more than the model's {size:,} tokens"


def quantized_problems(stored: Mapping[str, StoredModel | None]) -> Iterator[str]:
    """Yield the models whose weights are quantized, which cannot be trained, each with what to do about it."""
    for key, model in stored.items():
        try:
            if model is not None:
                refuse_quantized(str(model.folder), model.description, model.shapes)
        except RunError as error:
            yield f"{key}: {error.message}; {'; '.join(error.hints)}"
