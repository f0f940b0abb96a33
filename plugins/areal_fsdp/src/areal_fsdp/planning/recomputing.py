"""Activations that layers keep for the backward pass, and the choice of layers that recompute some of them.

With e bytes an element, a layer keeps these bytes of each token. The last column names their use in the backward pass:

    e x hidden          the layer's input                        norm, and the sum after attention
    e x hidden          the normed input                      *  weights of query, key and value
    e x query           the rotated query                        attention
    e x 2 key           the rotated key, the value               attention
    e x query           attention's result                       attention, and the weight after it
    4 x heads           logarithm of the softmax's denominator   attention
    e x hidden          attention's contribution to the sum      norm of the MLP
    e x hidden          the normed sum                        *  weights of gate and up
    e x 3 intermediate  gate, up, and silu(gate) x up (*)        the MLP; the last for the weight of down
    4 x 2               each norm's scale                     *

Layers that are not compiled also keep silu(gate). Norms of heads keep their inputs: query and key before rotation.

In an MoE, intermediate is that of all experts of a token together. Each of these experts has two more rows: the token's
input, which is recomputed elementwise, and the output of down; layers that are not compiled also keep the weighted
output. The router's outputs and the order of its choices take 4 x experts + 5 x 8 x choices, half of it elementwise.

A layer without attention keeps 5 e x mixed instead of query, key and attention's result; `mixed` is the width of its
projections from the residual stream. The factor 5 is measured: Qwen3.5-2B on an H200, compiled, with the kernels of
flash-linear-attention. Without these kernels a layer keeps several times as much.

`elementwise` recomputes all tensors with a star. This saves a third of the bytes for a few percent of the time, because
it repeats neither matrix products nor attention. `whole` keeps only the layer's input and, if compiled, attention's
result with its denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from areal_fsdp.planning.decoder import Decoder

Checkpointing = Literal["none", "selective", "full"]
"""The setting `activation_checkpointing`."""
Amount = Literal["nothing", "elementwise", "whole"]
"""The part of a layer that is recomputed."""
_KEPT_BY_MIXERS = 5
_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True, slots=True)
class Recomputing:
    """Numbers of layers that recompute something; the other layers keep everything.

    The first layers recompute the most: when the backward pass reaches them, the others' activations are freed.

    Attributes:
        elementwise: layers that recompute everything except matrix products and attention.
        whole: layers that recompute everything.
    """

    elementwise: int = 0
    whole: int = 0

    def of_layers(self, count: int) -> list[Amount]:
        """Return the part that each of `count` layers recomputes, the first layer first."""
        amounts: list[tuple[Amount, int]] = [("whole", self.whole), ("elementwise", self.elementwise)]
        amounts.append(("nothing", count - self.whole - self.elementwise))
        return [amount for amount, layers in amounts for _ in range(layers)]

    def describe(self, count: int) -> str:
        """Return a description for `count` layers, such as `full` or `selective, 3 of 28 layers whole`."""
        if self.whole == count:
            return "full"
        if self.whole:
            return f"selective, {self.whole} of {count} layers whole"
        if self.elementwise:
            return "selective" if self.elementwise == count else f"selective, {self.elementwise} of {count} layers"
        return "no checkpointing"

    @classmethod
    def of(cls, mode: Checkpointing, layers: int, sizes: dict[Amount, int] | None, budget: int | None) -> Recomputing:
        """Return the least recomputation that keeps within `budget`.

        More and more layers recompute elementwise, then more and more layers recompute everything.

        Args:
            mode: the setting. `none` and `full` ignore the budget.
            layers: number of the model's layers.
            sizes: result of `kept_by_a_layer` for a micro-batch; needed only with a budget.
            budget: bytes that all layers together may keep. None: all layers recompute elementwise. If it is smaller
                than any choice needs, all layers recompute everything.
        """
        if mode != "selective":
            return cls(whole=layers if mode == "full" else 0)
        if budget is None or sizes is None:
            return cls(elementwise=layers)
        steps = [*(cls(count) for count in range(layers + 1)), *(cls(layers - n, n) for n in range(1, layers + 1))]
        return next((step for step in steps if step.kept(layers, sizes) <= budget), steps[-1])

    def kept(self, layers: int, sizes: dict[Amount, int]) -> int:
        """Return the bytes that all layers keep, from the bytes that one layer of each kind keeps."""
        return sum(sizes[amount] for amount in self.of_layers(layers))


def kept_by_a_layer(model: Decoder, element: int, tokens: int, *, is_compiled: bool) -> dict[Amount, int]:
    """Return the bytes that a layer keeps of `tokens`, by the part that it recomputes; see the table above.

    For a hybrid model it is the mean of the two kinds of layers.
    """
    rotated = model.query + 2 * model.key
    denominators = _FLOAT * model.heads
    everything = 4 * model.hidden + rotated + model.query + (model.query + model.key) * model.norms_heads
    products = 2 * model.hidden + rotated + model.query + 2 * model.intermediate
    rows = model.choices * model.hidden
    everything += (2 if is_compiled else 3) * rows
    products += (1 if is_compiled else 2) * rows
    routes = _FLOAT * model.experts + 5 * _INDEX * model.choices
    if not is_compiled:
        products += model.hidden  # the output of down: only a compiler sees that the backward pass does not use it
    sizes: dict[Amount, int] = {
        "nothing": element * (everything + (3 if is_compiled else 4) * model.intermediate)
        + routes
        + denominators
        + 2 * _FLOAT,
        "elementwise": element * products + routes // 2 + denominators,
        "whole": element * model.hidden + (element * model.query + denominators if is_compiled else 0),
    }
    mixing = element * (
        4 * model.hidden + _KEPT_BY_MIXERS * model.mixed + (3 if is_compiled else 4) * model.intermediate
    )
    of_mixers: dict[Amount, int] = {"nothing": mixing, "elementwise": mixing, "whole": element * model.hidden}
    with_attention = model.attention_layers / model.layers
    return {
        amount: round(tokens * (with_attention * size + (1 - with_attention) * of_mixers[amount]))
        for amount, size in sizes.items()
    }
