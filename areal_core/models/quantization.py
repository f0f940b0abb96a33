"""Quantized weights: which model folders hold them, and why they are not trained.

A trainer learns in float32 and syncs unquantized weights. A server that has loaded quantized weights has other tensors
under other names, and would take over only a part of the update, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable

FP8_SCALE: Final = "_scale_inv"
"""Suffix of the tensor with the scales of an FP8 matrix."""
FP8_FACTORS: Final = (FP8_SCALE, ".input_scale", ".activation_scale")
"""Suffixes of all tensors that belong to an FP8 matrix."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that hold one MXFP4 matrix."""
_TELLING: Final = (FP8_SCALE, ".qzeros", ".weight_scale")
"""Suffixes that only tensors of quantized weights have, whatever the method."""
DEQUANTIZED: Final = ("fp8", "mxfp4")
"""Methods that `areal dequantize` converts to bfloat16: those of DeepSeek and gpt-oss."""


def quantization_of(description: Mapping[str, Any]) -> str:
    """Return the quantization method that a config.json names; empty for none."""
    quantization = description.get("quantization_config") or description.get("compression_config")
    if quantization is None:
        text = description.get("text_config")
        return quantization_of(text) if text else ""
    if not isinstance(quantization, Mapping):
        return str(quantization)
    return str(quantization.get("quant_method") or "compressed-tensors")


def refuse_quantized(folder: str, description: Mapping[str, Any], names: Iterable[str] = ()) -> None:
    """Raise `RunError` if a model's weights are quantized: a run can neither train them nor compare with them.

    An empty `quantization_config` is refused, too: transformers takes it for an unknown method.

    Args:
        folder: the model's folder.
        description: its config.json.
        names: names of its tensors, if they are known.

    Example:
        >>> from areal_core.models import refuse_quantized
        >>> refuse_quantized("/models/qwen", {"model_type": "qwen3"})
        >>> refuse_quantized("/models/qwen-fp8", {"quantization_config": {"quant_method": "fp8"}})
        Traceback (most recent call last):
            ...
        areal_core.errors.RunError: the weights of '/models/qwen-fp8' are quantized (fp8), and servers get whole ones
          write it in bfloat16 once, areal dequantize /models/qwen-fp8 NEW_FOLDER, and name that folder
    """
    if description.get("quantization_config") == {}:
        raise RunError(
            f"config.json of '{folder}' has an empty quantization_config, which transformers and servers refuse",
            hints=["remove this key from config.json: the weights are not quantized"],
        )
    if not (method := quantization_of(description)):
        if scale := next((name for name in names if name.endswith(_TELLING)), None):
            raise RunError(
                f"the weights of '{folder}' are quantized: '{scale}' is the scale of others, and config.json has no "
                "quantization_config",
                hints=["copy the config.json that was published with these files"],
            )
        return
    hint = "name the folder of the model in bfloat16 that was quantized"
    if method in DEQUANTIZED:
        hint = f"write it in bfloat16 once, areal dequantize {folder} NEW_FOLDER, and name that folder"
    raise RunError(f"the weights of '{folder}' are quantized ({method}), and servers get whole ones", hints=[hint])


def plain_shapes(description: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights as `areal dequantize` writes them, without the scales.

    Args:
        description: the model's config.json.
        shapes: shapes of the tensors in its files. If `areal dequantize` does not know the method, they are returned
            unchanged.
    """
    if quantization_of(description) not in DEQUANTIZED:
        return dict(shapes)
    plain = {}
    for name, shape in shapes.items():
        whole = name.removesuffix(MXFP4_BLOCKS)
        if name != whole and f"{whole}{MXFP4_SCALES}" in shapes:  # [..., out, in / 32, 16] bytes of two numbers
            *leading, outputs, groups, size = shape
            plain[whole] = (*leading, groups * size * 2, outputs)
        elif not name.endswith(FP8_FACTORS) and not (
            name.endswith(MXFP4_SCALES) and f"{name.removesuffix(MXFP4_SCALES)}{MXFP4_BLOCKS}" in shapes
        ):
            plain[name] = shape
    return plain
