"""What a model asks of its attention, which the results of a few tokens do not show.

A window or a chunk of thousands of tokens changes nothing in a short sequence, and neither does a soft cap. So a model
runs once under an attention that notes what each layer hands it: the function that transformers makes the layer's mask
from, and what else the layer passes.
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
_LEFT_OUT = ("softcap", "s_aux", "position_bias")
"""Arguments of a layer that scaled dot products leave out."""


class Asked(NamedTuple):
    """What the attention layers of a model ask for.

    Attributes:
        layers: attention layers that showed their masks.
        more: names of what they pass and scaled dot products leave out.
        fault: why the masks of `AttentionMasks` are not those of the model; empty where they are.
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
    """Compare the masks that a model makes with those that the engine makes for it, at up to 262,144 tokens.

    Args:
        model: whose attention is another one from now on; set it again.
        masks: the engine's; None where it has none for the model.
        ids: [1, T] int64, a short sequence.

    Raises:
        Exception: whatever the model raises under an attention that it does not know.
    """
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, shown_mask)
    theirs = _called(model, ids, None)
    more = sorted({name for call in theirs for name in call.more})
    if masks is None:
        return Asked(len(theirs), more, "")
    ours = _called(model, ids, masks.for_layers(lambda window: _marked(model, ids, window)))
    if len(theirs) != len(ours):
        return Asked(len(theirs), more, "its layers differ with the mask that they are given")
    for their, our in zip(theirs, ours, strict=True):
        if not hasattr(their.mask, "visible") or not hasattr(our.mask, "near"):
            return Asked(len(theirs), more, f"{their.layer} does not show its mask")
        if not _are_same(their, our):
            return Asked(len(theirs), more, f"{their.layer} asks for a mask that is no window of earlier tokens")
    return Asked(len(theirs), more, "")


def _marked(model: PreTrainedModel, ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return a mask that the model takes for ready made, and that knows its window; a copy would not know it."""
    length = ids.shape[1]
    places = {"dtype": model.dtype, "device": model.device}
    return shown_mask(1, length, length, mask_function=torch.ge, local_size=window, **places)


def _called(model: PreTrainedModel, ids: torch.Tensor, masks: Any) -> list[_Call]:
    """Return what each attention layer was called with in a forward; its results are thrown away."""
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
        more = [name for name in _LEFT_OUT if extras.get(name) is not None]
        calls.append(_Call(type(module).__name__, attention_mask, sliding_window, more))
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)  # the shape of the results
        return heads.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    set_attention(model, _NAME)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=masks, use_cache=False)
    return calls


def _are_same(their: _Call, our: _Call) -> bool:
    """Whether two masks show the same where masks of these kinds differ."""
    theirs: Any = their.mask
    ours: Any = our.mask
    queries, keys = probe_positions(theirs.near, their.window, ours.near, device=theirs.device)
    wanted = keys <= queries
    if ours.near is not None:
        wanted = wanted & (queries - keys < ours.near)
    return bool((theirs.visible(0, 0, queries, keys).expand_as(wanted) == wanted).all())
