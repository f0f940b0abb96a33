"""Export a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from areal_fsdp.parallel.loading import unread_weights
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from areal_core.engines import ModelReference

_NOT_KEPT = ("quantization_config", "auto_map", "torch_dtype", "rope_scaling", "rope_theta")
"""Keys of a published config that an export leaves out.

The weights are not quantized, the model's own code is not copied, and transformers writes the others with new names.
"""
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of processors of images and sound, which are copied to the export."""


def write_model(
    folder: Path,
    model: PreTrainedModel,
    reference: ModelReference,
    parameters: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write a Hugging Face folder; collective.

    Args:
        folder: the target folder.
        model: the model, for its config and class; its parameters are not read.
        reference: the model's source, for its tokenizer and dtype.
        parameters: whole tensors with the names of the model's files. Every rank iterates over them, rank 0 keeps them.

    Raises:
        RunError: the folder cannot be written.
    """
    rank, _ = rank_and_ranks()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if rank == 0:
            weights[name] = tensor.to("cpu", copy=True)
    failure: Exception | None = None
    if rank == 0:
        try:
            # Saving validates the generation config, which fails for some published files, such as one with a
            # temperature but without sampling. `write_description` copies the published file.
            if generation_config_file(reference) is not None:
                model.generation_config = GenerationConfig()
            weights = unread_weights(model, reference.path, trust_remote_code=reference.trust_remote_code) | weights
            # The names are already those of the files.
            model.save_pretrained(folder, state_dict=weights, save_original_format=False)
            write_description(folder, model, reference)
        except Exception as error:  # noqa: BLE001 - the other ranks wait in fail_together
            failure = error
    fail_together(failure, f"exporting the model to '{folder}'")


def rehearse_export(model: PreTrainedModel, reference: ModelReference, adapter: Any = None) -> None:
    """Write an export without weights to a temporary folder, so that a run fails before its start; collective.

    Args:
        model: the model that will be exported.
        reference: the model's source.
        adapter: PEFT's config of an adapter that is exported too, or None.

    Raises:
        RunError: the files cannot be written.
    """
    failure: Exception | None = None
    if rank_and_ranks()[0] == 0:
        try:
            with tempfile.TemporaryDirectory(prefix="areal-export-") as folder:
                write_description(Path(folder), model, reference)
                if adapter is not None:
                    adapter.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - the other ranks wait in fail_together
            failure = error
    fail_together(failure, f"a trial export of '{reference.path}'")


def write_description(folder: Path, model: PreTrainedModel, reference: ModelReference) -> None:
    """Write all files of a model's folder except its weights."""
    published = generation_config_file(reference)
    if published is not None:
        shutil.copyfile(published, folder / GENERATION_CONFIG_NAME)
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    config = deepcopy(model.config)
    config.dtype = reference.dtype  # the dtype of the exported weights; the model in memory may be in float32
    config.save_pretrained(folder)
    _keep_published_keys(folder, reference)
    _copy_tokenizer(reference, folder)
    for name in _PROCESSORS:
        if (file := _file_of(reference, name)) is not None:
            shutil.copyfile(file, folder / name)


def _keep_published_keys(folder: Path, reference: ModelReference) -> None:
    """Add keys of the published config.json that transformers reads but does not write.

    Servers need them: SGLang 0.5.23 does not start with a Qwen3.5 without `full_attention_interval`, which transformers
    writes as `layer_types`.
    """
    if (published_file := _file_of(reference, CONFIG_NAME)) is None:
        return
    saved_file = folder / CONFIG_NAME
    saved, published = (json.loads(file.read_text(encoding="utf-8")) for file in (saved_file, Path(published_file)))
    saved_file.write_text(json.dumps(_completed(saved, published), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _completed(saved: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    missing = {key: value for key, value in published.items() if key not in saved and key not in _NOT_KEPT}
    parts = {
        key: _completed(saved[key], value)
        for key, value in published.items()
        if key.endswith("_config") and isinstance(value, dict) and isinstance(saved.get(key), dict)
    }
    return {**missing, **saved, **parts}


def generation_config_file(reference: ModelReference) -> str | None:
    """Return the path of the model's published generation config, which an export copies; None if it has none."""
    return _file_of(reference, GENERATION_CONFIG_NAME)


def _file_of(reference: ModelReference, name: str) -> str | None:
    try:
        path: str | None = cached_file(reference.path, name)
    except OSError:
        return None
    return path


def _copy_tokenizer(reference: ModelReference, folder: Path) -> None:
    """Write the source's tokenizer, if it has one."""
    source = Path(reference.path)
    if source.is_dir() and not any(source.glob("tokenizer*")) and not (source / "vocab.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(reference.path, trust_remote_code=reference.trust_remote_code)
    tokenizer.save_pretrained(folder)
