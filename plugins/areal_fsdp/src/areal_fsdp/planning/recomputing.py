"""What layers keep for the backward pass, and which of them compute what again so that they keep less.

In bytes for each token and layer, e bytes an element, the backward pass finds (each tensor once):

    e x hidden          the layer's input                        norm, and the sum behind attention
    e x hidden          the normed input                      *  weights of query, key and value
    e x query           the rotated query                        attention
    e x 2 key           the rotated key, the value               attention
    e x query           attention's result                       attention, and the weight behind it
    4 x heads           logarithm of the softmax's denominator   attention
    e x hidden          attention's contribution to the sum      norm of the MLP
    e x hidden          the normed sum                        *  weights of gate and up
    e x 3 intermediate  gate, up, and silu(gate) x up (*)        the MLP; the last for the weight of down
    4 x 2               each norm's scale                     *

Where layers are not compiled, silu(gate) is one more. Norms of heads keep their inputs, query and key before rotation.
Of an MoE, intermediate is that of all a token's choices together, and each choice has two rows of its own: the
token's, which is elementwise to make again, and what down gives; where layers are not compiled, that weighted besides.
What the router gave, and the order of its choices, come to 4 x experts + 5 x 8 x choices, half of it elementwise.

A layer that mixes tokens without attention keeps 5 e x mixed in the place of query, key and attention's result, `mixed`
being the width of its projections from the residual stream. This is measured and no count: Qwen3.5-2B on an H200,
compiled, with the kernels of flash-linear-attention. Without these kernels it keeps several times as much.

A layer may compute again what is marked by a star, all of it `elementwise`: a third of the bytes for a few percent of
the time, because no matrix product and no attention is among it. A layer that is computed again `whole` keeps its input
and, compiled, attention's result with its denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from areal_fsdp.planning.decoder import Decoder

Checkpointing = Literal["none", "selective", "full"]
"""The setting `activation_checkpointing`."""
Amount = Literal["nothing", "elementwise", "whole"]
"""What of a layer is computed again."""
_KEPT_BY_MIXERS = 5
_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True, slots=True)
class Recomputing:
    """How many layers compute what again; the others keep everything.

    The first layers are those that keep least: the backward pass comes to them when the others' activations are gone.

    Attributes:
        elementwise: layers that compute everything but matrix products and attention again.
        whole: layers that are computed again whole.
    """

    elementwise: int = 0
    whole: int = 0

    def of_layers(self, count: int) -> list[Amount]:
        """Of each of so many layers."""
        amounts: list[tuple[Amount, int]] = [("whole", self.whole), ("elementwise", self.elementwise)]
        amounts.append(("nothing", count - self.whole - self.elementwise))
        return [amount for amount, layers in amounts for _ in range(layers)]

    def words(self, count: int) -> str:
        """The choice for so many layers: `no checkpointing`, `selective`, `full`, and where a budget lies between."""
        if self.whole == count:
            return "full"
        if self.whole:
            return f"selective, {self.whole} of {count} layers whole"
        if self.elementwise:
            return "selective" if self.elementwise == count else f"selective, {self.elementwise} of {count} layers"
        return "no checkpointing"

    @classmethod
    def of(cls, mode: Checkpointing, layers: int, sizes: dict[Amount, int] | None, budget: int | None) -> Recomputing:
        """The least that keeps within `budget`: first what is elementwise in ever more layers, then whole layers.

        Args:
            mode: none or full, whatever the budget is.
            layers: of the model.
            sizes: bytes that a layer keeps of a micro-batch; not needed where there is no budget.
            budget: bytes of all layers together; None takes what is nearly free. One below what whole layers keep
                takes these.
        """
        if mode != "selective":
            return cls(whole=layers if mode == "full" else 0)
        if budget is None or sizes is None:
            return cls(elementwise=layers)
        steps = [*(cls(count) for count in range(layers + 1)), *(cls(layers - n, n) for n in range(1, layers + 1))]
        return next((step for step in steps if step.kept(layers, sizes) <= budget), steps[-1])

    def kept(self, layers: int, sizes: dict[Amount, int]) -> int:
        """Bytes of all layers, from those of one of each kind."""
        return sum(sizes[amount] for amount in self.of_layers(layers))


def kept_by_a_layer(model: Decoder, element: int, tokens: int, *, is_compiled: bool) -> dict[Amount, int]:
    """Bytes that a layer keeps of so many tokens, by what it computes again; the table above.

    A hybrid model's layers are of two kinds, and this is their mean.
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
        products += model.hidden  # what down gives, which only a compiler sees that nobody needs
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
