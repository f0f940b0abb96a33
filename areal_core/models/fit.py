"""Whether a model's files hold the weights that its config asks for, by names and shapes: no values are read.

transformers builds the model without memory (on PyTorch's `meta` device) and loads a `Placeholder` for each tensor of
the files. So its own rules decide which tensors are renamed, joined or split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import RunError
from areal_core.models.images import auto_class_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

_SHOWN: Final = 3
"""Tensors that an error names."""


class Placeholder:
    """A tensor of a file without its values. transformers reads it as a slice, and makes a tensor without memory.

    Attributes:
        shape: shape of the tensor.
        made: the tensors that transformers has made of it.

    Example:
        >>> import torch
        >>> from areal_core.models import Placeholder
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> shapes = {"wte.weight": [16, 8], "wpe.weight": [4, 8], "ln_f.weight": [8], "ln_f.bias": [8]}
        >>> files = {name: Placeholder(shape) for name, shape in shapes.items()}
        >>> config = GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=0, bos_token_id=0, eos_token_id=0)
        >>> model = GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=files, dtype=torch.float32)
        >>> model.transformer.wpe.weight.is_meta, files["wpe.weight"].made  # a parameter without memory, and its source
        (True, [tensor(..., device='meta', size=(4, 8))])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.made: list[torch.Tensor] = []

    def __deepcopy__(self, memo: object) -> Placeholder:
        return self

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of safetensors does."""
        return list(self.shape)

    def __getitem__(self, place: object) -> Placeholder:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of this shape on the `meta` device."""
        import torch

        tensor = torch.empty(self.shape, dtype=dtype, device="meta")
        self.made.append(tensor)
        return tensor


def check_weights_fit(
    folder: Path, shapes: Mapping[str, Sequence[int]], *, scalar: bool = False, trust_remote_code: bool = False
) -> None:
    """Check that transformers finds every weight of a model in its files, in the shape that config.json asks for.

    A model that transformers cannot build on the `meta` device is not checked.

    Args:
        folder: the model's folder.
        shapes: shapes of the tensors in its files, by name.
        scalar: whether the model gets a head of one value. Then its own head may be missing.
        trust_remote_code: whether code that ships with the model may run.

    Raises:
        RunError: weights are missing or have another shape, or transformers refuses the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"num_labels": 1} if scalar else {}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        factory = AutoModelForSequenceClassification if scalar else auto_class_of(config)
        with torch.device("meta"):
            empty = factory.from_config(config, trust_remote_code=trust_remote_code, attn_implementation="eager")
        model, report = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict={name: Placeholder(shape) for name, shape in shapes.items()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
            dtype=torch.float32,  # for a config without a dtype: transformers would ask the placeholders for theirs
        )
    except (RuntimeError, TypeError, AttributeError):
        return
    except Exception as error:
        raise RunError(f"transformers cannot load '{folder}': {' '.join(str(error).split())[:400]}") from error
    body = f"{model.base_model_prefix}."
    missing = sorted(name for name in report["missing_keys"] if name.startswith(body) or not scalar)
    if missing:
        raise RunError(
            f"the weights in '{folder}' are not those of its config.json: {len(missing)} are missing, such as "
            f"{', '.join(missing[:_SHOWN])}",
            hints=["copy the model again, or correct config.json"],
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise RunError(
            f"the weights in '{folder}' are not those of its config.json: {len(wrong)} have another shape, such as "
            f"{name}, which is {list(stored)} and must be {list(expected)}",
            hints=["copy the model again, or correct config.json"],
        )
