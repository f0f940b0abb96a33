"""The sizes of a decoder that memory and arithmetic follow from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from areal_core.models import EXPERTS, text_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LAYER = re.compile(r".*?\.(\d+)\.")
_QUERIES = re.compile(r"\b(q_proj|q_b_proj|qkv_proj|query_key_value|query|c_attn|qkv|Wqkv)\b")
"""Names of the projections that only a layer with attention has."""
_BEHIND = re.compile(r"\b(mlp|feed_forward|experts|shared_expert|block_sparse_moe|moe|out_proj|o_proj)\b")
"""Names of what a layer has behind its mixer."""
_DENSE_LAYERS = ("mlp_only_layers", "first_k_dense_replace")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of equal layers, each attention and a gated MLP or an MoE of such experts.

    Attributes:
        layers: how many.
        hidden, intermediate: width of the residual stream and of the MLP; of an MoE, of all experts that a token
            goes through.
        query, key: width of all heads together, and of all key heads.
        heads: of attention.
        vocabulary: rows of the head; 0 where the head is a single number.
        words: rows of the embedding.
        layer_parameters: of all layers.
        root_parameters: of everything else: embeddings, head, last norm.
        largest_layer: parameters of the largest layer.
        norms_heads: whether queries and keys go through norms of their own.
        attention_layers: layers with attention; the others of a hybrid model have a convolution or a recurrence.
        experts: of an MoE, 0 where there are none; shared ones, which every token goes through, do not count.
        choices: of these, how many a token goes through.
        expert_parameters: of these, in all layers.
        mixed: width of what the other layers mix tokens by: the outputs of their projections from the residual stream.
        window_layers: of those with attention, those whose tokens see only `window` tokens.
        window: in tokens, 0 where there is none.
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
    attention_layers: int
    experts: int = 0
    choices: int = 0
    expert_parameters: int = 0
    mixed: int = 0
    window_layers: int = 0
    window: int = 0

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Those that a token is computed with: of an MoE, its choices of experts alone."""
        idle = self.expert_parameters * (self.experts - self.choices) // self.experts if self.experts else 0
        return self.parameters - idle

    @classmethod
    def of(
        cls, description: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, scalar: bool = False
    ) -> Decoder | None:
        """Read the sizes; None where the config lacks some. Of a composite model they are the language model's.

        Args:
            description: a Hugging Face model's config.json.
            shapes: of its tensors, by name.
            scalar: whether its head gives one number and not a vocabulary's logits.
        """
        text = text_config(description)
        of_text = {name: shape for name, shape in shapes.items() if is_of_text(description, name)}
        if shapes and not any(
            map(_LAYER.match, of_text)
        ):  # older composite files name layers as those of a plain model
            return None
        shapes = of_text
        try:
            hidden, layers, heads = (text[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
            vocabulary = text["vocab_size"]
            intermediate, experts, choices = _mlp(text)
        except KeyError:
            return None
        size, _ = head_sizes(text)
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
            experts=experts,
            choices=choices,
            expert_parameters=sum(count for name, count in counted.items() if experts and ".experts." in name),
            **_layers_of_each_kind(shapes, layers, hidden),
            **_windows(text, layers),
        )

    def divided(self, tensors: int, experts: int = 1) -> Decoder:
        """What one rank has of so many of tensor parallelism, or of expert parallelism.

        A vocabulary that they do not divide it has whole. Experts are sharded over all ranks in any case; those of a
        layer that a rank gathers are fewer.
        """
        elsewhere = self.expert_parameters * (experts - 1) // (experts * self.layers)
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
            largest_layer=(self.largest_layer - elsewhere) // tensors,
        )

    def training_flops(self, lengths: Iterable[int], learning: int | None = None) -> float:
        """Of a forward and a backward pass over sequences of these lengths: 6 N T for the products with N parameters
        (those of the layers that a token is computed with, and the head; a look-up in the embeddings is none), and
        causal attention's own products, 12 x width of the heads for each pair of tokens that see each other in a layer.
        What is computed again does not count, nor do the products of a recurrence with its state.

        Args:
            lengths: in tokens.
            learning: parameters of an adapter, which alone learns: then the others' products are 4 N T, for nobody
                computes the gradient of a frozen matrix.
        """
        tokens, pairs = 0, 0.0
        for length in lengths:
            seen = min(length, self.window)
            tokens += length
            pairs += (self.attention_layers - self.window_layers) * length**2 / 2
            pairs += self.window_layers * (length * seen - seen**2 / 2)
        products = self.active_parameters - self.root_parameters + self.vocabulary * self.hidden
        of_products = 6.0 * products if learning is None else 4.0 * products + 6.0 * learning
        return of_products * tokens + 12.0 * self.query * pairs


def is_of_text(description: Mapping[str, Any], name: str) -> bool:
    """Whether text goes through the tensor of a model of this config; through a vision tower's it does not."""
    return "text_config" not in description or ".language_model." in f".{name}" or "lm_head" in name


def head_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Size of a head's queries and keys, and of its values, from a config with `hidden_size` and heads.

    Latent attention (DeepSeek-V2, arXiv 2405.04434) has two parts in a key, and values of a size of their own; its
    `head_dim` is the part with positions alone.
    """
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if (plain := text.get("qk_nope_head_dim")) is None:
        return size, size
    return plain + text["qk_rope_head_dim"], text.get("v_head_dim") or size


def _layers_of_each_kind(shapes: Mapping[str, tuple[int, ...]], layers: int, hidden: int) -> dict[str, int]:
    """Layers with a projection of queries; and the width by which the others mix tokens, on average over these.

    All layers count as such with attention where no projection has a known name.
    """
    by_layer: dict[str, list[str]] = {}
    for name in shapes:
        if place := _LAYER.match(name):
            by_layer.setdefault(place[0], []).append(name)
    others = [names for names in by_layer.values() if not any(map(_QUERIES.search, names))]
    if len(others) == len(by_layer):
        return {"attention_layers": layers}
    mixers = [name for names in others for name in names if not _BEHIND.search(name)]
    wide = sum(shapes[name][0] for name in mixers if len(shapes[name]) == 2 and shapes[name][1] == hidden)
    return {"attention_layers": layers - len(others), "mixed": wide // max(1, len(others))}


def _windows(text: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Layers whose attention has a window, and how many tokens it shows."""
    window = text.get("sliding_window") or 0
    kinds = text.get("layer_types") or ["sliding_attention"] * layers
    if not window or text.get("use_sliding_window") is False:
        return {}
    return {"window_layers": kinds.count("sliding_attention"), "window": window}


def _mlp(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Width of the MLP that a token goes through, at most; experts, and how many of them a token goes through.

    Raises:
        KeyError: a size is missing.
    """
    if not (experts := experts_of(text)):
        return text["intermediate_size"], 0, 0
    width, choices = text.get("moe_intermediate_size") or text["intermediate_size"], text["num_experts_per_tok"]
    if not choices:
        raise KeyError("num_experts_per_tok")
    shared = text.get("shared_expert_intermediate_size") or width * (text.get("n_shared_experts") or 0)
    has_dense = any(text.get(name) for name in _DENSE_LAYERS) or text.get("decoder_sparse_step", 1) > 1
    return max(choices * width + shared, text["intermediate_size"] if has_dense else 0), experts, choices


def experts_of(text: Mapping[str, Any]) -> int:
    """Of an MoE, from its config; 0 for a model without."""
    return next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
