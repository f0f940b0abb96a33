"""The model of a run: its folder, its tokenizer, the tokens that end an answer, and the sampling parameters."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.needs import roles_of
from areal_core.disk import WEIGHTS_INDEX as WEIGHTS_INDEX  # noqa: PLC0414 - plugins import it from here
from areal_core.disk import is_folder, read_shapes
from areal_core.disk import weight_files as weight_files  # noqa: PLC0414 - plugins import it from here
from areal_core.errors import RunError
from areal_core.interfaces.inference import SamplingParameters
from areal_core.interfaces.model import ModelReference, StoredModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from areal_core.config import Resolved, RunConfig
    from areal_core.runtime.folder import RunFolder


MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
"""Files of a hub repository to download for a model. A repository may have the same weights in other formats, too."""
DESCRIPTION_FILES = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")
"""Files that describe a model without its weights."""
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$")
"""Matches the folder of one commit of a repository in huggingface_hub's cache."""


def model_reference(resolved: Resolved, run: RunFolder) -> ModelReference:
    """Return the model that every process of the run loads.

    Args:
        resolved: config of the run.
        run: the run folder, which has the path of a model that `model.source` has made.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import RunFolder, model_reference
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(Path(folder))
        ...     _ = run.model_note.write_text("/cache/models/addition")  # the preset has a model source
        ...     model_reference(resolve("grpo/addition"), run)
        ModelReference(path='/cache/models/addition', dtype='float32', trust_remote_code=False)
    """
    model = resolved.config.model
    path = run.model_note.read_text() if model.path is None else model_path(resolved, model.path)
    return ModelReference(path, model.dtype, model.trust_remote_code)


def model_paths(config: RunConfig, made: str | Path | None = None) -> dict[str, str]:
    """Return the paths of a run's models as the config has them, by the key that names each, such as `model.path`.

    Args:
        config: config of the run.
        made: folder of the model that `model.source` has made; None if there is none.
    """
    own = {f"roles.{name}.path": getattr(chosen.common, "path", None) for name, chosen in config.roles.items()}
    return {key: str(path) for key, path in {"model.path": config.model.path or made, **own}.items() if path}


def model_path(resolved: Resolved, path: str, key: str = "model.path", files: Sequence[str] = MODEL_FILES) -> str:
    """Return the folder of a model that a config names by a path or by a name on the Hugging Face hub.

    A relative path is relative to the folder of the config. A name on the hub is downloaded to huggingface_hub's cache,
    as far as it is not there. If the path is a folder of this cache on another machine, the same commit is downloaded.

    Args:
        resolved: config of the run.
        path: path or name, as the config has it.
        key: config key that names the model, for the error.
        files: patterns of the files to download.

    Raises:
        RunError: there is no such folder, and the download failed.
    """
    return _folder_of(resolved.base_dir / path, path, key, files)


def model_folders(resolved: Resolved) -> dict[str, str]:
    """Return the folders of a run's models by the config key that names each, such as `model.path`.

    Models on the Hugging Face hub are downloaded, as far as its cache lacks them. A model that `model.source` makes
    is not among them.

    Raises:
        RunError: there is no such folder, and the download failed.

    Example:
        >>> import tempfile
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import model_folders
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     resolved = resolve("grpo/addition", overrides=["model.source=null", f"model.path={folder}"])
        ...     model_folders(resolved) == {"model.path": folder}
        True
    """
    return {key: model_path(resolved, path, key) for key, path in model_paths(resolved.config).items()}


def read_model(folder: Path) -> StoredModel:
    """Read a model's config.json and the shapes of its weights, without the weights themselves.

    Raises:
        RunError: a file is missing or cannot be read.
    """
    from areal_core.models.quantization import plain_shapes

    try:
        description = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / 'config.json'} cannot be read ({error})", hints=["a Hugging Face folder has one"]
        ) from error
    return StoredModel(folder, description, plain_shapes(description, read_shapes(folder)))


def models_by_role(config: RunConfig, stored: Mapping[str, StoredModel | None]) -> dict[str, StoredModel]:
    """Return the model of each role of the algorithm. A role without a path uses the run's model.

    Args:
        config: config of the run.
        stored: the models that are on this machine, by the config key that names each.
    """
    shared = stored.get("model.path")
    names = roles_of(config.algorithm, config.training.updates)
    return {name: model for name in names if (model := stored.get(f"roles.{name}.path", shared)) is not None}


def described_model(path: str) -> Path:
    """Return the folder of a model with at least the files that describe it. Weights on the hub are not downloaded.

    Args:
        path: path of a folder, or a name on the Hugging Face hub.

    Raises:
        RunError: there is no such folder or name, or it is not a model of transformers.
    """
    path = os.path.expanduser(path)  # noqa: PTH111 - a name on the hub is not a path
    folder = Path(_folder_of(Path.cwd() / path, path, "MODEL", DESCRIPTION_FILES))
    config = folder / "config.json"
    hint = "name a Hugging Face model folder (config.json, *.safetensors, tokenizer files) or a hub name"
    if not config.is_file():
        raise RunError(f"'{path}' is not a model: the folder has no config.json", hints=[hint])
    try:
        description = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{config} cannot be read: {error}", hints=["copy or download the model again"]) from error
    if not isinstance(description, dict) or not isinstance(description.get("model_type"), str):
        raise RunError(f"{config} has no model_type, so it does not describe a model of transformers", hints=[hint])
    return folder


def _folder_of(local: Path, path: str, key: str, files: Sequence[str]) -> str:
    kept = _SNAPSHOT.search(path)
    if is_folder(local):
        return str(local)
    name, commit = (f"{kept[1]}/{kept[2]}", kept[3]) if kept else (path, None)
    hint = "name a Hugging Face folder, relative to that of the config, or a model of the hub, ORGANIZATION/NAME"
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) or is_folder(local.parent):
        raise RunError(f"{key}: there is no folder {local}", hints=[hint])
    try:
        from huggingface_hub import snapshot_download

        # Skip other copies of the weights: those in subfolders, and Mistral's own format.
        copies = ["*/*.safetensors", "consolidated*"]
        return snapshot_download(name, revision=commit, allow_patterns=[*files], ignore_patterns=copies)
    except Exception as error:
        cause = " ".join(str(error).split())[:400]
        raise RunError(
            f"{key}: there is no folder {local}, and '{name}' cannot be downloaded from the Hugging Face hub: {cause}",
            hints=[hint],
        ) from error


def load_tokenizer(model: ModelReference) -> Any:
    """Return the model's tokenizer. Its `model_max_length` is the model's context, which tokenizer files often lack.

    Raises:
        RunError: transformers is missing, or the folder holds no tokenizer.
    """
    hints = ["model.path must be a Hugging Face folder with tokenizer files, or a name on the hub"]
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RunError(
            f"a tokenizer needs transformers: {error}", hints=["pip install 'transformers>=5.17,<6'"]
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise RunError(f"the model '{model.path}' has no readable tokenizer: {cause}", hints=hints) from error
    # Without tokenizer files, transformers makes an empty tokenizer for some models: every prompt has no tokens.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise RunError(f"the model '{model.path}' has no tokenizer files", hints=hints)
    if (context := _context_of(model)) is not None:
        tokenizer.model_max_length = context
    return tokenizer


def _context_of(model: ModelReference) -> int | None:
    """Return the context of the model in tokens; None if its config does not have it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):  # the folder has only a tokenizer
        return None
    context: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context


def check_same_tokens(model: ModelReference, role: str, other: ModelReference) -> None:
    """Check that a role's model has the token ids of the run's model, which every role reads.

    Nothing is checked if the role's folder has no tokenizer.

    Raises:
        RunError: the same ids are other tokens in the role's model.
    """
    try:
        role_vocabulary = load_tokenizer(other).get_vocab()
    except RunError:
        return
    vocabulary = load_tokenizer(model).get_vocab()
    # Some tokens may be missing: models of one family add different special tokens behind the common ones.
    missing = vocabulary.keys() - role_vocabulary.keys()
    differing = [token for token, number in vocabulary.items() if role_vocabulary.get(token, number) != number]
    if 2 * len(missing) > len(vocabulary):
        differing += sorted(missing)
    if differing:
        raise RunError(
            f"role '{role}': the model '{other.path}' has other tokens than '{model.path}': {len(differing)} of "
            f"{len(vocabulary)} differ, such as {differing[0]!r}",
            hints=["the role reads the policy's token ids: choose a model of the same family for it"],
        )


def vocabulary_size(model: ModelReference, tokenizer: Any) -> int:
    """Return the number of token ids of the model. Some of them may have no text."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return max(len(tokenizer), config.get_text_config().vocab_size)


def end_tokens(model: ModelReference, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer; see `chat.answers.end_tokens`.

    Some chat models name the end of a turn only in their generation config. Servers always stop there.

    Args:
        model: the model.
        tokenizer: its tokenizer, as from `load_tokenizer`.

    Example:
        >>> from types import SimpleNamespace
        >>> from areal_core.engines import ModelReference
        >>> from areal_core.programs import end_tokens
        >>> tokenizer = SimpleNamespace(eos_token_id=2, chat_template=None)
        >>> end_tokens(ModelReference("/models/tiny"), tokenizer)  # a model without a generation config
        frozenset({2})
    """
    from transformers import GenerationConfig

    from areal_core.chat import answers

    try:
        eos = GenerationConfig.from_pretrained(model.path).eos_token_id
    except (OSError, ValueError):  # the model has no generation config
        eos = None
    tokens = eos if isinstance(eos, list) else [eos]
    return answers.end_tokens(tokenizer, [token for token in tokens if token is not None])


def sampling_parameters(
    config: RunConfig, ends: Collection[int] = (), temperature: float | None = None
) -> SamplingParameters:
    """Return the sampling parameters of a config.

    Args:
        config: config of the run.
        ends: tokens that end an answer, in addition to those of the config; see `end_tokens`.
        temperature: that of an evaluation, which replaces the config's. 0 is greedy. An evaluation does not request
            `top_logprobs`, because nothing is learned from its answers.
    """
    section = config.sampling
    is_evaluation = temperature is not None
    values = section.model_dump(exclude={"temperature", "stop_token_ids", "stop", "allow_mismatched_sampling"})
    values |= {"top_logprobs": 0} if is_evaluation else {}
    chosen = section.temperature if temperature is None else temperature
    return SamplingParameters(
        temperature=chosen or 1.0,
        greedy=chosen == 0,
        stop_token_ids=tuple(sorted({*section.stop_token_ids, *ends})),
        stop=tuple(section.stop),
        **values,
    )
