"""What one rank holds at its fullest moment, from what the code keeps and makes.

The moments that are compared: the head's backward pass, when all activations are there; the backward pass of the last
layer; the end of it, when all gradients are. In bytes for each token and layer, e bytes an element, the backward pass
finds (each tensor once):

    e x hidden          the layer's input                        norm, and the sum behind attention
    e x hidden          the normed input                         weights of query, key and value
    e x query           the rotated query                        attention
    e x 2 key           the rotated key, the value               attention
    e x query           attention's result                       attention, and the weight behind it
    4 x heads           logarithm of the softmax's denominator   attention
    e x hidden          attention's contribution to the sum      norm of the MLP
    e x hidden          the normed sum                           weights of gate and up
    e x 3 intermediate  gate, up, and silu(gate) x up            the MLP; the last for the weight of down
    4 x 2               each norm's scale

Where layers are not compiled, silu(gate) is one more. Norms of heads keep their inputs, query and key before rotation.
Checkpointing keeps the layer's input and, compiled, attention's result with its denominator.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from areal_core.interfaces import Memory
from areal_planning.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.interfaces import RankLoad
    from areal_parallel.settings import ParallelSettings

_FLOAT = 4
_MOMENTS = 2 * _FLOAT
_GATHERED_LAYERS = 2
"""Of sharded parameters: the layer that computes, and the one that is fetched meanwhile."""
_CHUNK_ON_CPU = 1024
_SHARE_OF_GPU = 1 / 16
"""Of a GPU's memory, for a chunk's logits and their gradient: 8,192 tokens of 152,000 words on 141 GB. A product over
fewer tokens spends its time on the weight's gradient, which is read and written for each chunk."""
_TOKEN_STEP = 1024
"""Budgets of tokens are proposed in multiples of it."""


@dataclass(frozen=True, slots=True)
class Computing:
    """How an engine computes.

    Attributes:
        tokens: of a micro-batch.
        rounds: micro-batches of an update; only whether it is one matters.
        is_compiled: layers, head and update.
        recomputes: activation checkpointing.
        chunk_tokens: whose logits exist at once.
        shards: whether parameters are gathered layer by layer, be it from one rank.
        offloads: whether parameters, gradients and optimizer are in host memory.
    """

    tokens: int
    rounds: int
    is_compiled: bool
    recomputes: bool
    chunk_tokens: int
    shards: bool
    offloads: bool = False


def chunk_tokens(vocabulary: int, gpu_bytes: int | None) -> int:
    """Tokens whose logits may exist at once: a power of two, by the GPU's memory; on a CPU (None) by its cache."""
    if gpu_bytes is None:
        return _CHUNK_ON_CPU
    tokens = int(gpu_bytes * _SHARE_OF_GPU / (6 * max(1, vocabulary)))  # float32 logits, half-precision gradient
    return max(_CHUNK_ON_CPU, 1 << (tokens.bit_length() - 1)) if tokens else _CHUNK_ON_CPU


def memory_of(
    load: RankLoad,
    parallel: ParallelSettings,
    *,
    budget: int,
    compiles: bool | None,
    recomputes: bool,
    chunk: int | None,
    offloads: bool,
) -> Memory | None:
    """The fullest moment, from an engine's settings; None for a model whose layers are not known.

    Args:
        load: of the rank.
        parallel: how ranks divide the work.
        budget: `max_tokens_per_microbatch`.
        compiles: None for whatever the device is best with.
        recomputes: `activation_checkpointing`.
        chunk: `logprob_chunk_tokens`, None for the device's own number.
        offloads: `offload_parameters`, of which a CPU knows nothing.

    Raises:
        RunError: the ranks cannot divide the model's heads.
    """
    model = Decoder.of(load.description, load.shapes, scalar=load.role.head == "scalar")
    if model is None:
        return None
    parallel.heads(model.heads, model.key * model.heads // model.query)  # which the engine would refuse
    on_gpu = load.gpu_bytes is not None
    tokens = None if load.tokens is None else load.tokens * parallel.tensor
    way = Computing(
        tokens=min(budget, tokens or budget),
        rounds=2 if tokens is None else -(-tokens // budget),
        is_compiled=on_gpu if compiles is None else compiles,
        recomputes=recomputes and load.role.trains,
        chunk_tokens=chunk or chunk_tokens(model.vocabulary, load.gpu_bytes),
        shards=load.ranks > 1 or (offloads and on_gpu),
        offloads=offloads and on_gpu,
    )
    holders = max(1, load.ranks // (parallel.replicas * parallel.tensor))
    return peak_memory(model.divided(parallel.tensor), replace(load, ranks=holders), way)


def remedies(need: Callable[..., Memory | None], longest: int, room: int, most: int, *, recomputes: bool) -> list[str]:
    """Which of fewer tokens at once and checkpointing bring a rank below `room` bytes, as `PlansMemory.remedies`.

    Args:
        need: memory with other settings, by keyword.
        longest: tokens of a sequence that a rank has, at most.
        room: bytes.
        most: `max_tokens_per_microbatch` as it is.
        recomputes: `activation_checkpointing` as it is.
    """

    def fits(tokens: int, recompute: bool) -> bool:
        found = need(max_tokens_per_microbatch=tokens, activation_checkpointing=recompute)
        return found is not None and found.total <= room

    def largest(recompute: bool) -> int | None:
        place = bisect_left(budgets, True, key=lambda tokens: fits(tokens, recompute))  # fewer tokens always take less
        return budgets[place] if place < len(budgets) else None

    budgets = range((most - 1) // _TOKEN_STEP * _TOKEN_STEP, max(longest, _TOKEN_STEP) - 1, -_TOKEN_STEP)
    fewer = largest(recomputes)
    found = [] if fewer is None else [f"max_tokens_per_microbatch={fewer}"]
    if recomputes:
        return found
    if fits(most, recompute=True):
        return [*found, "activation_checkpointing=true"]
    both = largest(recompute=True)
    return found + ([] if both is None else [f"activation_checkpointing=true max_tokens_per_microbatch={both}"])


def peak_memory(model: Decoder, load: RankLoad, way: Computing) -> Memory:
    """The fullest moment of a step of a role that learns, of a forward pass of one that does not."""
    if not load.role.trains:
        return forward_memory(model, load, way)
    held, element = _held(model, load, way), _element(load)
    former, last = _gradients(model, load, way)
    kept = kept_activations(model, load, way)
    head_weight = model.vocabulary * model.hidden
    moments = (
        replace(held, gradients=former, activations=kept, head=_head(model, load, way)),
        replace(
            held,
            gradients=former + (element + (_FLOAT if way.shards else 0)) * model.largest_layer,
            activations=kept + _of_a_layer(model, load, way),
            head=element * head_weight,
        ),
        replace(held, gradients=last),
    )
    return max(moments, key=lambda moment: moment.total)


def forward_memory(model: Decoder, load: RankLoad, way: Computing) -> Memory:
    """The fullest moment of a forward pass without gradients."""
    held, element, tokens = _held(model, load, way), _element(load), way.tokens
    logits = _chunk(way) * model.vocabulary * (_FLOAT if way.is_compiled else 3 * _FLOAT)
    layer = element * tokens * (3 * model.intermediate + 2 * model.hidden)
    states = element * tokens * model.hidden
    at_head = replace(held, activations=states, head=logits)
    return max(at_head, replace(held, activations=layer), key=lambda moment: moment.total)


def _element(load: RankLoad) -> int:
    return 2 if load.dtype == "bfloat16" else _FLOAT


def _held(model: Decoder, load: RankLoad, way: Computing) -> Memory:
    """Parameters and optimizer: sharded float32 ones with what is gathered of them, or the whole."""
    role, element, gathered = load.role, _element(load), 0
    stored = _FLOAT if role.changes else element
    if way.shards:
        gathered = element * (model.root_parameters + _GATHERED_LAYERS * model.largest_layer)
    elif role.changes and element < _FLOAT:
        stored += element  # what is computed with, beside its master
    count = 0 if way.offloads else model.parameters / load.ranks
    parameters, optimizer = round(stored * count), round(_MOMENTS * count) if role.trains else 0
    return Memory(parameters + gathered, 0, optimizer, 0, 0, resident=parameters + optimizer)


def _gradients(model: Decoder, load: RankLoad, way: Computing) -> tuple[int, int]:
    """Gradients at the beginning and at the end of the last micro-batch's backward pass.

    Those of several micro-batches add up in float32, shard by shard as they come. Of a single one they stay as the
    backward pass made them, where the update is compiled and nothing is sharded.
    """
    whole = _FLOAT * model.parameters
    added = whole if not way.shards else 0 if way.offloads else round(whole / load.ranks)
    if way.rounds > 1:
        return added, added
    return 0, added if way.shards or not way.is_compiled else _element(load) * model.parameters


def kept_activations(model: Decoder, load: RankLoad, way: Computing) -> int:
    """Activations of all layers, the last hidden states before and behind their norm."""
    element = _element(load)
    layer = _saved(model, element, is_compiled=way.is_compiled)
    if way.recomputes:
        layer = element * model.hidden + (element * model.query + _FLOAT * model.heads if way.is_compiled else 0)
    return way.tokens * (model.layers * layer + 2 * element * model.hidden)


def _saved(model: Decoder, element: int, *, is_compiled: bool) -> int:
    """Bytes of a token that one layer keeps; the table above."""
    states = 4 * model.hidden + 2 * model.query + 2 * model.key + (model.query + model.key) * model.norms_heads
    return element * (states + (3 if is_compiled else 4) * model.intermediate) + _FLOAT * (model.heads + 2)


def _of_a_layer(model: Decoder, load: RankLoad, way: Computing) -> int:
    """What a layer's backward pass makes: its activations, where they are computed again, and their gradients."""
    element = _element(load)
    again = _saved(model, element, is_compiled=way.is_compiled) if way.recomputes else 0
    return way.tokens * (again + element * (3 * model.intermediate + 2 * model.hidden))


def _head(model: Decoder, load: RankLoad, way: Computing) -> int:
    """The head's backward pass: a chunk's float32 logits and their gradient (where nothing is compiled, three times
    float32); the weight's gradient, which is summed in float32; the hidden states' own."""
    if not model.vocabulary:
        return 0
    element = _element(load)
    logit = _FLOAT + element if way.is_compiled else 3 * _FLOAT
    states = model.hidden * (_FLOAT * model.vocabulary + element * way.tokens)
    return _chunk(way) * model.vocabulary * logit + states


def _chunk(way: Computing) -> int:
    """Tokens of a chunk: as few chunks as possible, of nearly the same length."""
    return -(-way.tokens // -(-way.tokens // way.chunk_tokens))
