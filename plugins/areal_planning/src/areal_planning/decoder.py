"""The sizes of a decoder that memory and arithmetic follow from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LAYER = re.compile(r".*?\.(\d+)\.")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of equal layers, each attention and a gated MLP.

    Attributes:
        layers: how many.
        hidden, intermediate: width of the residual stream and of the MLP.
        query, key: width of all heads together, and of all key heads.
        heads: of attention.
        vocabulary: rows of the head; 0 where the head is a single number.
        words: rows of the embedding.
        layer_parameters: of all layers.
        root_parameters: of everything else: embeddings, head, last norm.
        largest_layer: parameters of the largest layer.
        norms_heads: whether queries and keys go through norms of their own.
    """

    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    heads: int
    vocabulary: int
    words: int
    layer_parameters: int
    root_parameters: int
    largest_layer: int
    norms_heads: bool

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layer_parameters + self.root_parameters

    @classmethod
    def of(
        cls, description: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, scalar: bool = False
    ) -> Decoder | None:
        """Read the sizes; None where the config lacks some, or the layers have experts.

        Args:
            description: a Hugging Face model's config.json.
            shapes: of its tensors, by name.
            scalar: whether its head gives one number and not a vocabulary's logits.
        """
        text = description.get("text_config", description)
        try:
            hidden, layers, heads = (text[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
            intermediate, vocabulary = text["intermediate_size"], text["vocab_size"]
        except KeyError:
            return None
        if any(text.get(name) for name in _EXPERTS):
            return None
        size = text.get("head_dim") or hidden // heads
        tied = text.get("tie_word_embeddings", description.get("tie_word_embeddings", False))
        counted = {n: math.prod(shape) for n, shape in shapes.items() if not ((tied or scalar) and "lm_head" in n)}
        by_layer: dict[str, int] = {}
        for name, count in counted.items():
            place = _LAYER.match(name)
            key = place[0] if place else ""
            by_layer[key] = by_layer.get(key, 0) + count
        root = by_layer.pop("", 0)
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            query=heads * size,
            key=(text.get("num_key_value_heads") or heads) * size,
            heads=heads,
            vocabulary=0 if scalar else vocabulary,
            words=vocabulary,
            layer_parameters=sum(by_layer.values()),
            root_parameters=root,
            largest_layer=max(by_layer.values(), default=0),
            norms_heads=any("q_norm" in name for name in shapes),
        )

    def divided(self, tensors: int) -> Decoder:
        """What one of so many ranks of tensor parallelism has; a vocabulary that they do not divide it has whole."""
        of_words = 1 if self.words % tensors else tensors
        return replace(
            self,
            intermediate=self.intermediate // tensors,
            query=self.query // tensors,
            key=self.key // tensors,
            heads=self.heads // tensors,
            vocabulary=self.vocabulary // of_words,
            layer_parameters=self.layer_parameters // tensors,
            root_parameters=self.root_parameters // of_words,
            largest_layer=self.largest_layer // tensors,
        )

    def training_flops(self, lengths: Iterable[int]) -> float:
        """Of a forward and a backward pass over sequences of these lengths: 6 N T for the products with N parameters
        (those of the layers and the head; a look-up in the embeddings is none), and causal attention's own products,
        6 x layers x width of the heads x the sum of squared lengths. What is computed again does not count.
        """
        tokens = squares = 0
        for length in lengths:
            tokens, squares = tokens + length, squares + length**2
        products = self.layer_parameters + self.vocabulary * self.hidden
        return 6.0 * products * tokens + 6.0 * self.layers * self.query * squares
