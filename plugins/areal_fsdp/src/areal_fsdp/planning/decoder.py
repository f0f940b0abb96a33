"""The sizes of a decoder that determine its memory and FLOPs."""

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
"""Names of projections that only layers with attention have."""
_AFTER_MIXER = re.compile(r"\b(mlp|feed_forward|experts|shared_expert|block_sparse_moe|moe|out_proj|o_proj)\b")
"""Names of modules that come after a layer's mixer."""
_DENSE_LAYERS = ("mlp_only_layers", "first_k_dense_replace")


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a model of equal layers: attention, and a gated MLP or an MoE of such MLPs.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream.
        intermediate: width of the MLP; in an MoE, of all experts together that a token uses.
        query: width of all query heads.
        key: width of all key heads.
        heads: number of query heads.
        vocabulary: rows of the head; 0 for a scalar head.
        words: rows of the embedding.
        layer_parameters: parameters of all layers.
        root_parameters: parameters outside the layers: embeddings, head, last norm.
        largest_layer: parameters of the largest layer.
        norms_heads: True if queries and keys have norms.
        attention_layers: layers with attention; the others of a hybrid model have a convolution or a recurrence.
        experts: routed experts of an MoE layer, without shared experts; 0 for other models.
        choices: routed experts per token.
        expert_parameters: parameters of the routed experts in all layers.
        mixed: mean width of the projections from the residual stream in layers without attention.
        window_layers: layers with attention whose tokens see only `window` tokens.
        window: sliding window in tokens, 0 without one.
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
        """Number of parameters; tied parameters count once."""
        return self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token uses: in an MoE, only those of its experts."""
        idle = self.expert_parameters * (self.experts - self.choices) // self.experts if self.experts else 0
        return self.parameters - idle

    @classmethod
    def of(
        cls, description: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, scalar: bool = False
    ) -> Decoder | None:
        """Read the sizes of a model, or of a composite model's language model; None if the config lacks some.

        Args:
            description: a Hugging Face model's config.json.
            shapes: shapes of its tensors, by name.
            scalar: True for a head with one output instead of a vocabulary's logits.
        """
        text = text_config(description)
        of_text = {name: shape for name, shape in shapes.items() if is_of_text(description, name)}
        # Older composite files name the layers like those of a plain model.
        if shapes and not any(map(_LAYER.match, of_text)):
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
            layer = _LAYER.match(name)
            key = layer[0] if layer else ""
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
        """Return the sizes of one rank's part under tensor or expert parallelism.

        A vocabulary that the ranks do not divide stays whole. Expert parallelism changes only `largest_layer`: experts
        are sharded over all ranks with or without it, but a rank gathers fewer of them for a layer.

        Args:
            tensors: tensor-parallel degree.
            experts: expert-parallel degree.
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
        """Return the FLOPs of a forward and a backward pass over sequences of these lengths.

        The N parameters that a token uses, without the embedding, take 6 N per token. Causal attention takes 12 x width
        of the query heads for each layer and pair of tokens that see each other. Recomputation and the products of a
        recurrence with its state do not count.

        Args:
            lengths: lengths of the sequences in tokens.
            learning: number of an adapter's parameters, which alone learn; None without an adapter. Frozen parameters
                take 4 N per token, because their gradients are not computed.
        """
        tokens, pairs = 0, 0.0
        for length in lengths:
            visible = min(length, self.window)
            tokens += length
            pairs += (self.attention_layers - self.window_layers) * length**2 / 2
            pairs += self.window_layers * (length * visible - visible**2 / 2)
        products = self.active_parameters - self.root_parameters + self.vocabulary * self.hidden
        of_products = 6.0 * products if learning is None else 4.0 * products + 6.0 * learning
        return of_products * tokens + 12.0 * self.query * pairs


def is_of_text(description: Mapping[str, Any], name: str) -> bool:
    """Return True if the named tensor is used for text; a vision tower's tensors are not."""
    return "text_config" not in description or ".language_model." in f".{name}" or "lm_head" in name


def head_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of a head's queries and keys, and the size of its values.

    In latent attention (DeepSeek-V2, arXiv 2405.04434) a key has two parts, and values have another size; `head_dim` is
    only the part with rotary positions.
    """
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if (plain := text.get("qk_nope_head_dim")) is None:
        return size, size
    return plain + text["qk_rope_head_dim"], text.get("v_head_dim") or size


def _layers_of_each_kind(shapes: Mapping[str, tuple[int, ...]], layers: int, hidden: int) -> dict[str, int]:
    """Return `attention_layers` and `mixed` of `Decoder`.

    All layers count as layers with attention if no query projection has a known name.
    """
    by_layer: dict[str, list[str]] = {}
    for name in shapes:
        if layer := _LAYER.match(name):
            by_layer.setdefault(layer[0], []).append(name)
    others = [names for names in by_layer.values() if not any(map(_QUERIES.search, names))]
    if len(others) == len(by_layer):
        return {"attention_layers": layers}
    mixers = [name for names in others for name in names if not _AFTER_MIXER.search(name)]
    width = sum(shapes[name][0] for name in mixers if len(shapes[name]) == 2 and shapes[name][1] == hidden)
    return {"attention_layers": layers - len(others), "mixed": width // max(1, len(others))}


def _windows(text: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return `window_layers` and `window` of `Decoder`."""
    window = text.get("sliding_window") or 0
    kinds = text.get("layer_types") or ["sliding_attention"] * layers
    if not window or text.get("use_sliding_window") is False:
        return {}
    return {"window_layers": kinds.count("sliding_attention"), "window": window}


def _mlp(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return `intermediate` of the widest layer, `experts` and `choices` of `Decoder`.

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
    """Return the number of routed experts of a layer from a config; 0 for a model that is no MoE."""
    return next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
