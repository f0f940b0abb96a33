"""Finds out which attention a model needs, if outputs of a few tokens do not show it.

A window or chunk of thousands of tokens, or a soft cap, changes nothing in a short sequence. So the model runs once
with an attention that records the arguments of each layer: the function from which transformers makes the layer's mask,
and further arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from areal_core.models import probe_positions, set_attention, shown_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from areal_hf.masks import AttentionMasks

_NAME = "areal_asked"
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments of a layer that scaled dot-product attention ignores."""


class Asked(NamedTuple):
    """The attention that a model needs.

    Attributes:
        layers: number of attention layers that showed their masks.
        more: names of arguments that the layers pass and that scaled dot-product attention ignores.
        fault: why the masks of `AttentionMasks` are not those of the model; empty if they are.
    """

    layers: int
    more: list[str]
    fault: str


class _Call(NamedTuple):
    layer: str
    mask: torch.Tensor | None
    window: int | None
    more: list[str]


def asked_of_attention(model: PreTrainedModel, masks: AttentionMasks | None, ids: torch.Tensor) -> Asked:
    """Compare a model's masks with those that the engine makes for it, at positions of up to 262,144 tokens.

    Args:
        model: the model. The function changes its attention: set it again afterwards.
        masks: masks of the engine; None if it has none for the model.
        ids: [1, T] int64, a short sequence.

    Raises:
        Exception: any error of the model, which may not support another attention.
    """
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, shown_mask)
    model_calls = _called(model, ids, None)
    more = sorted({name for call in model_calls for name in call.more})
    if masks is None:
        return Asked(len(model_calls), more, "")
    engine_calls = _called(model, ids, masks.for_layers(lambda window: _marked(model, ids, window)))
    if len(model_calls) != len(engine_calls):
        return Asked(len(model_calls), more, "its layers are called differently with the engine's masks")
    for model_call, engine_call in zip(model_calls, engine_calls, strict=True):
        if not hasattr(model_call.mask, "visible") or not hasattr(engine_call.mask, "near"):
            return Asked(len(model_calls), more, f"{model_call.layer} does not show its mask")
        if not _are_same(model_call, engine_call):
            return Asked(
                len(model_calls), more, f"{model_call.layer} uses a mask that is not a window of earlier tokens"
            )
    return Asked(len(model_calls), more, "")


def _marked(model: PreTrainedModel, ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return a mask with its window, which the model passes on without a copy."""
    length = ids.shape[1]
    options = {"dtype": model.dtype, "device": model.device}
    return shown_mask(1, length, length, mask_function=torch.ge, local_size=window, **options)


def _called(model: PreTrainedModel, ids: torch.Tensor, masks: Any) -> list[_Call]:
    """Return the arguments of each attention layer in a forward, whose outputs are discarded."""
    calls: list[_Call] = []

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        more = [name for name in _UNSUPPORTED_ARGUMENTS if extras.get(name) is not None]
        calls.append(_Call(type(module).__name__, attention_mask, sliding_window, more))
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)  # as many heads as the outputs have
        return heads.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    set_attention(model, _NAME)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=masks, use_cache=False)
    return calls


def _are_same(model_call: _Call, engine_call: _Call) -> bool:
    """Return whether two masks are the same at all positions at which masks of these kinds can differ."""
    model_mask: Any = model_call.mask
    engine_mask: Any = engine_call.mask
    queries, keys = probe_positions(model_mask.near, model_call.window, engine_mask.near, device=model_mask.device)
    expected = keys <= queries
    if engine_mask.near is not None:
        expected = expected & (queries - keys < engine_mask.near)
    return bool((model_mask.visible(0, 0, queries, keys).expand_as(expected) == expected).all())
