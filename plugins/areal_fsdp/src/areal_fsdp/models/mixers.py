"""Layers that mix tokens outside attention, such as convolutions and recurrences: they compute padded rows.

In a packed batch, such a layer would take the end of one sequence for the past of the next. Here it computes each
sequence in a row of its own, padded at the end, where causality hides padding from all tokens.

`Leaks` finds these layers: it sets one sequence of a packed batch to NaN. A layer that leaks passes NaN on to other
sequences, even if its memory fades quickly. This needs no tolerance, so it works in bfloat16 as in float32.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from areal_fsdp.attention.hugging_face import BOUNDARIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from areal_fsdp.attention.hugging_face import Layout

_STRIPPED = ("packed_layout", "packed_context", *BOUNDARIES)


class Mixers:
    """The layers of a model that mix tokens outside attention, and those of them that compute sequences in rows.

    Args:
        model: a model with packed attention.

    Attributes:
        layout: layout of the current batch; None while the model computes as in transformers.
        found: names of the layers that leak without sequence boundaries.
        names: names of the layers that leak even with boundaries, and so compute in rows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.layout: Layout | None = None
        self.found: list[str] = []
        self.names: list[str] = []
        self._inside = False

    def add(self, name: str) -> None:
        """Make a layer compute in rows."""
        module: Any = self._model.get_submodule(name)
        original = module.forward

        @wraps(original)
        def forward(*inputs: Any, **named: Any) -> Any:
            if self.layout is None or self.layout.in_rows or self._inside:
                return original(*inputs, **named)
            self._inside = True
            try:
                return _in_rows(original, self.layout, inputs, {k: v for k, v in named.items() if k not in _STRIPPED})
            finally:
                self._inside = False

        # Not compiled, because each batch has another number of buckets.
        module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        self.names.append(name)


def _in_rows(original: Any, layout: Layout, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a layer's original forward for each bucket of rows, and return its results for packed tokens."""
    buckets, total = layout.buckets, len(layout.position_ids)
    leaves, form = tree_flatten((inputs, named))
    rows_of_leaves = [buckets.rows_of(leaf[0]) if _is_packed(leaf, total) else None for leaf in leaves]
    results = []
    for number in range(len(buckets.buckets)):
        parts = [leaf if rows is None else rows[number] for leaf, rows in zip(leaves, rows_of_leaves, strict=True)]
        positional, by_name = tree_unflatten(parts, form)
        results.append(original(*positional, **by_name))

    def pack(*parts: Any) -> Any:
        is_rows = isinstance(parts[0], torch.Tensor) and parts[0].shape[:2] == buckets.buckets[0]
        return buckets.packed_of(parts).unsqueeze(0) if is_rows else parts[0]

    return tree_map(pack, results[0], *results[1:])


def _is_packed(value: Any, total: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == total


class Leaks:
    """A context in which one packed forward pass shows the layers that pass NaN on to other sequences.

    The hook of a leaking layer records its name and sets the affected tokens to 0, so that later and outer layers are
    not blamed for it.

    Args:
        model: the model, which computes packed batches.
        poisoned: [T] bool, the tokens whose embeddings become NaN.

    Attributes:
        names: names of the leaking layers.
    """

    def __init__(self, model: PreTrainedModel, poisoned: torch.Tensor) -> None:
        self._model = model
        self._poisoned = poisoned
        self._clean_input: dict[str, bool] = {}
        self.names: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        embedding: Any = self._model.get_input_embeddings()
        self._hooks.append(embedding.register_forward_hook(self._poison))
        for name, module in self._model.named_modules():
            if name and module is not embedding:
                self._hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _poison(self, _: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(self._poisoned[None, :, None], torch.nan)

    def _others(self, values: Any) -> Iterator[torch.Tensor]:
        """Yield the hidden states of the other sequences among a layer's inputs or outputs, however nested."""
        for value in tree_leaves(values):
            if _is_packed(value, len(self._poisoned)) and value.is_floating_point():
                yield value[0, ~self._poisoned]

    def _before(self, name: str) -> Any:
        def hook(_: torch.nn.Module, inputs: Any, named: Any) -> None:
            self._clean_input[name] = all(map(_is_finite, self._others((inputs, named))))

        return hook

    def _after(self, name: str) -> Any:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> Any:
            if not self._clean_input.get(name) or all(map(_is_finite, self._others(output))):
                return None
            if name not in self.names:
                self.names.append(name)
            return tree_map(self._without_leak, output)

        return hook

    def _without_leak(self, value: Any) -> Any:
        if not _is_packed(value, len(self._poisoned)) or not value.is_floating_point():
            return value
        poisoned = self._poisoned.view(1, -1, *(1 for _ in value.shape[2:]))
        return torch.where(poisoned, value, 0)


def _is_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all())
