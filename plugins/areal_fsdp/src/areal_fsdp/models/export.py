"""A model as a folder of Hugging Face's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig

# `from transformers import AutoImageProcessor` needs torchvision in transformers 5.17; this module does not.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from areal_core.servers.images import sees_images
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from areal_core.interfaces import ModelReference

_processors: Any = AutoImageProcessor


def write_model(
    folder: Path,
    model: PreTrainedModel,
    reference: ModelReference,
    parameters: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write a Hugging Face folder; collective.

    Args:
        folder: its place.
        model: for config and names; its own parameters are not read.
        reference: where the model came from, for its tokenizer and dtype.
        parameters: as of `named_full_parameters`; every rank exhausts it, rank 0 keeps it.

    Raises:
        RunError: it cannot be written.
    """
    rank, _ = rank_and_ranks()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if rank == 0:
            weights[name] = tensor.to("cpu", copy=True)
    failure: Exception | None = None
    if rank == 0:
        try:
            own = generation_config_file(reference)
            if (
                own is not None
            ):  # saving validates it, and files exist that fail, such as with a temperature and no sampling
                model.generation_config = GenerationConfig()
            # names are the files' already
            model.save_pretrained(folder, state_dict=weights, save_original_format=False)
            if own is not None:
                shutil.copyfile(own, folder / GENERATION_CONFIG_NAME)
            model.config.dtype = reference.dtype  # the weights', while the model in memory may be in float32
            model.config.save_pretrained(folder)
            _copy_tokenizer(reference, folder)
            if sees_images(model.config):
                _processors.from_pretrained(reference.path).save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
            failure = error
    fail_together(failure, f"exporting the model to '{folder}'")


def generation_config_file(reference: ModelReference) -> str | None:
    """Return the path of the model's own generation config, which is exported as it is; None if it has none."""
    try:
        found: str | None = cached_file(reference.path, GENERATION_CONFIG_NAME)
    except OSError:
        return None
    return found


def _copy_tokenizer(reference: ModelReference, folder: Path) -> None:
    """Write the source's tokenizer, where it has one."""
    source = Path(reference.path)
    if source.is_dir() and not any(source.glob("tokenizer*")) and not (source / "vocab.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(reference.path, trust_remote_code=reference.trust_remote_code)
    tokenizer.save_pretrained(folder)
