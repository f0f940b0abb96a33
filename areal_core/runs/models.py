"""What every role of a run needs of the model: where it lies, its tokenizer, and how its tokens are sampled."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from areal_core.disk import is_folder
from areal_core.errors import RunError
from areal_core.interfaces import ModelReference, SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from areal_core.config import Resolved, RunConfig
    from areal_core.runs.folder import RunFolder


MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
"""What a repository of the hub has for a model: beside it may lie the same weights in other formats."""
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$")
"""Where huggingface_hub keeps a commit of a repository."""


def model_reference(resolved: Resolved, run: RunFolder) -> ModelReference:
    """The model that every process of the run loads."""
    model = resolved.config.model
    path = run.model_note.read_text() if model.path is None else model_path(resolved, model.path)
    return ModelReference(path, model.dtype, model.trust_remote_code)


def model_paths(config: RunConfig, made: str | Path | None = None) -> dict[str, str]:
    """The models of a run by the key of the config that names them; `made` is that of its source."""
    own = {f"roles.{name}.path": getattr(chosen.common, "path", None) for name, chosen in config.roles.items()}
    return {key: str(path) for key, path in {"model.path": config.model.path or made, **own}.items() if path}


def model_path(resolved: Resolved, path: str, key: str = "model.path", files: Sequence[str] = MODEL_FILES) -> str:
    """The folder that a config means, which is relative to its own, or else that of a name on the hub in
    huggingface_hub's cache, into which what is missing of `files` is downloaded.

    A folder of that cache which is not on this machine, such as another node's, is downloaded at the same commit.

    Raises:
        RunError: there is neither, or the download failed; the message names the key of the config.
    """
    local, kept = resolved.base_dir / path, _SNAPSHOT.search(path)
    if is_folder(local):
        return str(local)
    name, commit = (f"{kept[1]}/{kept[2]}", kept[3]) if kept else (path, None)
    hint = "name a Hugging Face folder, relative to that of the config, or a model of the hub, ORGANIZATION/NAME"
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) or is_folder(local.parent):
        raise RunError(f"{key}: there is no folder {local}", hints=[hint])
    try:
        from huggingface_hub import snapshot_download

        # Nor are weights in folders, and Mistral's own beside those for transformers.
        others = ["*/*.safetensors", "consolidated*"]
        return snapshot_download(name, revision=commit, allow_patterns=[*files], ignore_patterns=others)
    except Exception as error:
        words = f"{key}: there is no folder {local}, and '{name}' is not to be had from the Hugging Face hub"
        raise RunError(f"{words}: {' '.join(str(error).split())[:400]}", hints=[hint]) from error


def load_tokenizer(model: ModelReference) -> Any:
    """Return the model's tokenizer; its `model_max_length` is the model's context, which tokenizer files often lack.

    Raises:
        RunError: transformers is missing, or the folder holds no tokenizer.
    """
    hints = ["model.path must be a Hugging Face folder with tokenizer files, or a name on the hub"]
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        words = f"a tokenizer needs transformers: {error}"
        raise RunError(words, hints=["pip install 'transformers>=5.17,<6'"]) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        words = f"the model '{model.path}' has no readable tokenizer: {str(error).splitlines()[0]}"
        raise RunError(words, hints=hints) from error
    # Of some models transformers makes one out of nothing, which turns every prompt into no token at all.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise RunError(f"the model '{model.path}' has no tokenizer files", hints=hints)
    if (context := _context_of(model)) is not None:
        tokenizer.model_max_length = context
    return tokenizer


def _context_of(model: ModelReference) -> int | None:
    """Return the number of positions that the model has; None if its config does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        return None
    context: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context


def check_same_tokens(model: ModelReference, role: str, other: ModelReference) -> None:
    """Every role reads the token ids of the run's own model; a folder without a tokenizer says nothing of its ids.

    Raises:
        RunError: another model means other texts by them.
    """
    try:
        theirs = load_tokenizer(other).get_vocab()
    except RunError:
        return
    own = load_tokenizer(model).get_vocab()
    missing = own.keys() - theirs.keys()  # some are: models of a family add tokens of their own behind the common ones
    differing = [token for token, number in own.items() if theirs.get(token, number) != number]
    if 2 * len(missing) > len(own):
        differing += sorted(missing)
    if differing:
        raise RunError(
            f"role '{role}': the model '{other.path}' has other tokens than '{model.path}': {len(differing)} of "
            f"{len(own)} differ, such as {differing[0]!r}",
            hints=["it is given the policy's token ids: choose a model of the same family for this role"],
        )


def vocabulary_size(model: ModelReference, tokenizer: Any) -> int:
    """How many token ids the model has; some of them may have no text."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return max(len(tokenizer), config.get_text_config().vocab_size)


def end_tokens(model: ModelReference, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer; see `chat.answers.end_tokens`.

    Chat models may name the end of a turn in their generation config alone, and servers stop there whatever a request
    says.
    """
    from transformers import GenerationConfig

    from areal_core.chat import answers

    try:
        told = GenerationConfig.from_pretrained(model.path).eos_token_id
    except (OSError, ValueError):  # it has none
        told = None
    named = told if isinstance(told, list) else [told]
    return answers.end_tokens(tokenizer, [token for token in named if token is not None])


def sampling_parameters(
    config: RunConfig, ends: Collection[int] = (), temperature: float | None = None
) -> SamplingParameters:
    """The engine's settings from the config's.

    Args:
        config: of the run.
        ends: tokens that end an answer beside those of the config; see `end_tokens`.
        temperature: in place of the config's; 0 is greedy.
    """
    section = config.sampling
    values = section.model_dump(exclude={"temperature", "stop_token_ids", "stop", "allow_mismatched_sampling"})
    chosen = section.temperature if temperature is None else temperature
    return SamplingParameters(
        temperature=chosen or 1.0,
        greedy=chosen == 0,
        stop_token_ids=tuple(sorted({*section.stop_token_ids, *ends})),
        stop=tuple(section.stop),
        **values,
    )
