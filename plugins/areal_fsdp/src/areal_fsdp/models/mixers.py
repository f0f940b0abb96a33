"""Layers that mix tokens outside attention, such as convolutions and recurrences: a row of its own for each sequence.

In a packed batch such a layer takes the end of one sequence for the past of the next. Here it computes the sequences
side by side, each in a row, padded at its end where causality hides padding from every token.

Which layers these are is seen, not known: one sequence of a packed batch becomes NaN. A layer that leaks passes NaN on
to tokens of other sequences, whatever its class is called and however faint its memory is: no tolerance is involved,
so bfloat16 shows as much as float32.
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
        model: has packed attention already.

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
        """Let a layer compute in rows from now on."""
        module: Any = self._model.get_submodule(name)
        own = module.forward

        @wraps(own)
        def forward(*inputs: Any, **named: Any) -> Any:
            if self.layout is None or self.layout.in_rows or self._inside:
                return own(*inputs, **named)
            self._inside = True
            try:
                return _in_rows(own, self.layout, inputs, {k: v for k, v in named.items() if k not in _STRIPPED})
            finally:
                self._inside = False

        # Each batch has another number of buckets: a compiler goes around this.
        module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        self.names.append(name)


def _in_rows(own: Any, layout: Layout, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    buckets, total = layout.buckets, len(layout.position_ids)
    leaves, form = tree_flatten((inputs, named))
    laid = [buckets.rows_of(leaf[0]) if _is_packed(leaf, total) else None for leaf in leaves]
    results = []
    for number in range(len(buckets.buckets)):
        parts = [leaf if rows is None else rows[number] for leaf, rows in zip(leaves, laid, strict=True)]
        positional, by_name = tree_unflatten(parts, form)
        results.append(own(*positional, **by_name))

    def together(*parts: Any) -> Any:
        is_rows = isinstance(parts[0], torch.Tensor) and parts[0].shape[:2] == buckets.buckets[0]
        return buckets.packed_of(parts).unsqueeze(0) if is_rows else parts[0]

    return tree_map(together, results[0], *results[1:])


def _is_packed(value: Any, total: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == total


class Leaks:
    """A context in which one packed pass shows which layers let NaN tokens reach others.

    A layer that does so is reported, and what it spoiled becomes 0, so that layers behind it and around it are judged
    by what they do themselves.

    Args:
        model: computes packed batches.
        poisoned: [T] bool, the tokens that become NaN behind the embedding.

    Attributes:
        names: of the layers.
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
                self._hooks.append(module.register_forward_hook(self._behind(name)))
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

    def _behind(self, name: str) -> Any:
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
        keeps = self._poisoned.view(1, -1, *(1 for _ in value.shape[2:]))
        return torch.where(keeps, value, 0)


def _is_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all())
