"""Estimate the peak memory of one rank from the tensors that the engine allocates.

The peak is the largest of three moments: the head's backward pass, when all activations exist; the backward pass of the
last layer; and the end of the backward pass, when all gradients exist. `areal_fsdp.planning.recomputing` lists the
activations that layers keep.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, Literal

from areal_core.errors import RunError
from areal_core.models import text_config
from areal_fsdp.planning.decoder import Decoder, experts_of, is_of_text
from areal_fsdp.planning.meter import GIB
from areal_fsdp.planning.recomputing import Recomputing, kept_by_a_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_core.sdk import Role
    from areal_fsdp.parallel.settings import ParallelSettings
    from areal_fsdp.planning.recomputing import Checkpointing

_FLOAT = 4
_GATHERED_LAYERS = 2
"""Sharded layers that are gathered at the same time: the current one, and the next one, which is prefetched."""
_FULL: Final = {"activation_checkpointing": "full", "activation_memory_gib": None}
_SELECTIVE: Final = {"activation_checkpointing": "selective", "activation_memory_gib": None}
_BUDGET_STEP = 0.01
"""Proposed values of activation_memory_gib are multiples of this, in GiB."""
_CHUNK_ON_CPU = 1024
_SHARE_OF_GPU = 1 / 16
"""Share of a GPU's memory for a chunk's logits and their gradient: 8,192 tokens of 152,000 words on 141 GB.

The weight's gradient is read and written for each chunk. With fewer tokens this would dominate the time.
"""
_MOST_STEPS = 4096
_TOKEN_STEP = 1024
"""Proposed values of max_tokens_per_microbatch are multiples of this."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The model and the work of one rank in a role.

    Attributes:
        description: the model's config.json.
        shapes: shapes of the tensors in its safetensors, by name.
        role: the model's role.
        dtype: dtype of the computation.
        ranks: number of ranks over which the model may be sharded.
        tokens: upper bound of the tokens of an update on a rank; None if unknown.
        longest: tokens of the longest sequence that the config allows.
        gpu_bytes: memory of the rank's GPU, None for a CPU.
        shows_images: True if the model's vision tower computes. If not, its parameters are frozen.
    """

    description: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    role: Role
    dtype: Literal["float32", "bfloat16"]
    ranks: int
    tokens: int | None = None
    longest: int = 0
    gpu_bytes: int | None = None
    shows_images: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank's device at the peak of a step.

    Attributes:
        parameters: parameters in the dtype of the computation, float32 masters, and parameters gathered from other
            ranks.
        gradients: gradients of parameters.
        optimizer: optimizer state.
        activations: activations kept for the backward pass, and temporaries of a layer.
        head: logits, their gradient, and the float32 gradient of the head's weight.
        resident: the part of the total that stays allocated between steps.
        recomputing: description of the activation checkpointing; empty for a role that does not learn.
        learning: description of the adapter that learns; empty without an adapter.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    resident: int
    recomputing: str = field(default="", compare=False)
    learning: str = field(default="", compare=False)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


@dataclass(frozen=True, slots=True)
class Computing:
    """How an engine computes.

    Attributes:
        tokens: tokens of a micro-batch.
        rounds: micro-batches of an update; it matters only whether this is 1.
        is_compiled: True if layers, head and update are compiled.
        recomputing: activation checkpointing.
        chunk_tokens: tokens whose logits exist at the same time.
        shards: True if `fully_shard` gathers parameters layer by layer, even on a single rank.
        offloads: True if parameters, gradients and optimizer state are in host memory.
        moment_bytes: bytes on the device of one element of one of AdamW's moments.
        state_bytes: see `MemoryChoices`.
        learning: number of an adapter's parameters; None without an adapter.
    """

    tokens: int
    rounds: int
    is_compiled: bool
    recomputing: Recomputing
    chunk_tokens: int
    shards: bool
    offloads: bool = False
    moment_bytes: int = _FLOAT
    state_bytes: tuple[float, float] | None = None
    learning: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryChoices:
    """The settings of an engine that determine its memory.

    Attributes:
        budget: `max_tokens_per_microbatch`.
        compiles: `compile`; None for the device's default.
        checkpointing: `activation_checkpointing`; None: selective if layers are compiled, otherwise none.
        activations: `activation_memory_gib` in bytes; None if no whole layer is recomputed.
        chunk: `logprob_chunk_tokens`, None for the device's default.
        offloads: `offload_parameters`; ignored on a CPU.
        half_moments: True if AdamW's moments are in bfloat16.
        offloads_moments: `offload_optimizer`; ignored on a CPU.
        state_bytes: bytes of another optimizer's state for an element of a layer, and for an element of the embedding
            or the head; None for the engine's own AdamW.
        learning: number of an adapter's parameters; None without an adapter.
    """

    budget: int
    compiles: bool | None
    checkpointing: Checkpointing | None
    activations: int | None
    chunk: int | None
    offloads: bool
    half_moments: bool
    offloads_moments: bool
    state_bytes: tuple[float, float] | None = None
    learning: int | None = None

    def recomputing(self, model: Decoder | None, layers: int, dtype: str, *, is_compiled: bool) -> Recomputing:
        """Return the activation checkpointing that these settings choose.

        Args:
            model: a rank's part of the model, None for unknown layers.
            layers: number of the model's layers.
            dtype: dtype of the computation.
            is_compiled: True if layers are compiled.

        Raises:
            RunError: activation_memory_gib is set, and the layers are unknown.
        """
        sizes = None
        if self.checkpointing == "selective" and self.activations is not None:
            if model is None:
                raise RunError(
                    "activation_memory_gib needs a model whose layers are attention and one MLP: the activations of "
                    "this model's layers are not known",
                    hints=["leave activation_memory_gib out, or set activation_checkpointing=full"],
                )
            sizes = kept_by_a_layer(model, element_bytes(dtype), self.budget, is_compiled=is_compiled)
        mode = self.checkpointing or ("selective" if is_compiled else "none")
        return Recomputing.of(mode, layers, sizes, self.activations)


def chunk_tokens(vocabulary: int, gpu_bytes: int | None) -> int:
    """Return the number of tokens whose logits may exist at the same time.

    It is a power of two that fits a share of the GPU's memory; for a CPU (None) it is chosen for the cache.
    """
    if gpu_bytes is None:
        return _CHUNK_ON_CPU
    tokens = int(gpu_bytes * _SHARE_OF_GPU / (6 * max(1, vocabulary)))  # float32 logits, half-precision gradient
    return max(_CHUNK_ON_CPU, 1 << (tokens.bit_length() - 1)) if tokens else _CHUNK_ON_CPU


def memory_of(load: RankLoad, parallel: ParallelSettings, choices: MemoryChoices) -> Memory | None:
    """Return the peak memory of a rank from an engine's settings; None for a model with unknown layers.

    Args:
        load: the rank's model and work.
        parallel: the engine's parallelism.
        choices: the settings that determine memory.

    Raises:
        RunError: the ranks cannot divide the model's heads or experts, or the model is a VLM and they would have to.
    """
    text = text_config(load.description)
    parallel.experts(experts_of(text))  # raises if the engine's setup would
    if load.shows_images and load.description.get("vision_config") is not None:
        parallel.refuse_images(str(load.description.get("model_type")))
        return None
    model = Decoder.of(load.description, load.shapes, scalar=load.role.head == "scalar")
    if model is None:
        return None
    parallel.heads(model.heads, model.key * model.heads // model.query)
    on_gpu = load.gpu_bytes is not None
    tokens = None if load.tokens is None else load.tokens * parallel.tensor
    part, budget = model.divided(parallel.tensor, parallel.expert), choices.budget
    is_compiled = on_gpu if choices.compiles is None else choices.compiles
    recomputing = choices.recomputing(part, model.layers, load.dtype, is_compiled=is_compiled)
    computing = Computing(
        tokens=min(budget, tokens or budget),
        rounds=2 if tokens is None else -(-tokens // budget),
        is_compiled=is_compiled,
        recomputing=recomputing if load.role.trains else Recomputing(),
        chunk_tokens=choices.chunk or chunk_tokens(model.vocabulary, load.gpu_bytes),
        shards=load.ranks > 1 or (choices.offloads and on_gpu),
        offloads=choices.offloads and on_gpu,
        moment_bytes=0 if choices.offloads_moments and on_gpu else _FLOAT // (2 if choices.half_moments else 1),
        state_bytes=choices.state_bytes,
        learning=choices.learning,
    )
    holders = max(1, load.ranks // (parallel.replicas * parallel.tensor))
    recomputed = recomputing.describe(model.layers) if load.role.trains else ""
    if recomputed and (mixers := model.layers - model.attention_layers):
        recomputed += f"; an estimate, {mixers} of {model.layers} layers have no attention"
    peak = peak_memory(part, replace(load, ranks=holders), computing)
    beside = [shape for name, shape in load.shapes.items() if not is_of_text(load.description, name)]
    frozen = element_bytes(load.dtype) * sum(map(prod, beside)) // (holders if computing.shards else 1)
    return replace(peak, parameters=peak.parameters + frozen, resident=peak.resident + frozen, recomputing=recomputed)


def remedies(need: Callable[..., Memory | None], load: RankLoad, room: int, choices: MemoryChoices) -> list[str]:
    """Return changes of settings that bring a rank below `room` bytes.

    They are fewer tokens per micro-batch, checkpointing, or both; offloading to host memory if these do not suffice.

    Args:
        need: returns the memory with other settings, given by keyword.
        load: the rank's model and work, with `longest` for the rank's part of a sequence.
        room: bytes that are available.
        choices: the current settings.

    Returns:
        Alternatives, each `key=value` or several of these separated by blanks; empty if nothing fits.
    """

    def fits(**changes: Any) -> bool:
        return _total(need(**changes)) <= room

    def arguments(changes: Mapping[str, Any]) -> str:
        shown = {k: "null" if v is None else v for k, v in changes.items() if v is not None or choices.activations}
        return " ".join(f"{key}={value}".lower() for key, value in shown.items())

    def most_fitting_tokens(**changes: Any) -> int | None:
        index = bisect_left(  # fewer tokens always need less memory
            budgets, True, key=lambda tokens: fits(max_tokens_per_microbatch=tokens, **changes)
        )
        return budgets[index] if index < len(budgets) else None

    first_budget = (choices.budget - 1) // _TOKEN_STEP * _TOKEN_STEP
    budgets = range(first_budget, max(load.longest, _TOKEN_STEP) - 1, -_TOKEN_STEP)
    fewer = most_fitting_tokens()
    alternatives = [] if fewer is None else [f"max_tokens_per_microbatch={fewer}"]
    if choices.checkpointing != "full":
        if fits(**_FULL):
            alternatives.append(arguments(_checkpointing(need, room, choices)))
        elif (both := most_fitting_tokens(**_FULL)) is not None:
            alternatives.append(arguments({**_FULL, "max_tokens_per_microbatch": both}))
    if alternatives:
        return alternatives
    if choices.state_bytes is not None:
        return []  # other optimizers cannot offload
    for checkpointing in ({}, _FULL):
        for key in ("offload_optimizer", "offload_parameters"):
            changes: dict[str, Any] = {key: True, **checkpointing}
            if fits(**changes):
                return [arguments(changes)]
    return []


def most_tokens(need: Callable[..., Memory | None], room: int) -> int:
    """Return the tokens of the largest micro-batch that fits `room` bytes, a multiple of 1,024; 0 if none fits.

    Args:
        need: returns the memory with other settings, given by keyword.
        room: bytes that are available.
    """

    def is_too_large(steps: int) -> bool:
        return _total(need(max_tokens_per_microbatch=steps * _TOKEN_STEP)) > room

    return (bisect_left(range(1, _MOST_STEPS + 1), True, key=is_too_large)) * _TOKEN_STEP


def _checkpointing(need: Callable[..., Memory | None], room: int, choices: MemoryChoices) -> dict[str, Any]:
    """Return the checkpointing that fits `room` bytes and costs the least time; `full` must fit."""
    if choices.checkpointing == "none" and _total(need(**_SELECTIVE)) <= room:
        return _SELECTIVE
    steps = range(int(room / GIB / _BUDGET_STEP), 0, -1)  # with the smallest budget, layers keep as little as with full
    budgets = [{**_SELECTIVE, "activation_memory_gib": round(step * _BUDGET_STEP, 2)} for step in steps]
    index = bisect_left(budgets, True, key=lambda budget: _total(need(**budget)) <= room)
    return _FULL if index == len(budgets) or need(**budgets[index]) == need(**_FULL) else budgets[index]


def _total(memory: Memory | None) -> float:
    return inf if memory is None else memory.total


def peak_memory(model: Decoder, load: RankLoad, computing: Computing) -> Memory:
    """Return the peak memory of a training step; of a forward pass for a role that does not learn."""
    if not load.role.trains:
        return forward_memory(model, load, computing)
    held, element = _held(model, load, computing), _element(load)
    former, last = _gradients(model, load, computing)
    kept = kept_activations(model, load, computing)
    head_weight = model.vocabulary * model.hidden
    moments = (
        replace(held, gradients=former, activations=kept, head=_head(model, load, computing)),
        replace(
            held,
            gradients=former + (element + (_FLOAT if computing.shards else 0)) * _learning_layer(model, computing),
            activations=kept + _of_a_layer(model, load, computing),
            head=element * head_weight,
        ),
        replace(held, gradients=last),
    )
    return max(moments, key=lambda moment: moment.total)


def forward_memory(model: Decoder, load: RankLoad, computing: Computing) -> Memory:
    """Return the peak memory of a forward pass without gradients."""
    held, element, tokens = _held(model, load, computing), _element(load), computing.tokens
    logits = _chunk(computing) * model.vocabulary * (_FLOAT if computing.is_compiled else 3 * _FLOAT)
    layer = element * tokens * (3 * model.intermediate + (2 + 2 * model.choices) * model.hidden)
    states = element * tokens * model.hidden
    at_head = replace(held, activations=states, head=logits)
    return max(at_head, replace(held, activations=layer), key=lambda moment: moment.total)


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of `bfloat16` or `float32`."""
    return 2 if dtype == "bfloat16" else _FLOAT


def _element(load: RankLoad) -> int:
    return element_bytes(load.dtype)


def _held(model: Decoder, load: RankLoad, computing: Computing) -> Memory:
    """Return parameters, gathered layers and optimizer state; other parts are 0."""
    role, element, gathered = load.role, _element(load), 0
    stored = _FLOAT if role.changes and computing.learning is None else element
    if computing.shards:
        gathered = element * (model.root_parameters + _GATHERED_LAYERS * model.largest_layer)
    elif role.changes and computing.learning is None and element < _FLOAT:
        stored += element  # the copy in the dtype of the computation, in addition to the master
    count = 0 if computing.offloads else model.parameters / load.ranks
    learning = count if computing.learning is None else 0 if computing.offloads else computing.learning / load.ranks
    adapter = 0 if computing.learning is None else learning * (_FLOAT + element)  # masters, and copies in the dtype
    parameters = round(stored * count + adapter)
    optimizer = 0
    if role.trains and computing.state_bytes is None:
        optimizer = round(2 * computing.moment_bytes * learning)
    elif role.trains and computing.state_bytes is not None:
        of_layer, of_other = computing.state_bytes
        outside = model.root_parameters / load.ranks if computing.learning is None else 0
        optimizer = round(of_layer * (learning - outside) + of_other * outside)
    return Memory(parameters + gathered, 0, optimizer, 0, 0, resident=parameters + optimizer)


def _gradients(model: Decoder, load: RankLoad, computing: Computing) -> tuple[int, int]:
    """Return the bytes of gradients at the beginning and at the end of the last micro-batch's backward pass.

    Gradients of several micro-batches are accumulated in float32, sharded if parameters are. Gradients of a single
    micro-batch stay in the dtype of the computation if the update is compiled and nothing is sharded.
    """
    learning = model.parameters if computing.learning is None else computing.learning
    whole = _FLOAT * learning
    accumulated = whole if not computing.shards else 0 if computing.offloads else round(whole / load.ranks)
    if computing.rounds > 1:
        return accumulated, accumulated
    # Offloaded moments and other optimizers have another update, which reads gradients in float32.
    is_fused = computing.is_compiled and computing.moment_bytes > 0 and computing.state_bytes is None
    return 0, accumulated if computing.shards or not is_fused else _element(load) * learning


def _learning_layer(model: Decoder, computing: Computing) -> int:
    """Return the number of trained parameters of the largest layer; an adapter has nearly the same in each layer."""
    return model.largest_layer if computing.learning is None else computing.learning // model.layers


def kept_activations(model: Decoder, load: RankLoad, computing: Computing) -> int:
    """Return the bytes of the activations of all layers, and of the last hidden states before and after the norm."""
    sizes = kept_by_a_layer(model, _element(load), computing.tokens, is_compiled=computing.is_compiled)
    return computing.recomputing.kept(model.layers, sizes) + 2 * _element(load) * model.hidden * computing.tokens


def _of_a_layer(model: Decoder, load: RankLoad, computing: Computing) -> int:
    """Return the bytes that the last layer's backward pass allocates: recomputed activations, and gradients.

    The first layers may recompute more, but their backward pass comes when the other layers' activations are freed.
    """
    element = _element(load)
    sizes = kept_by_a_layer(model, element, computing.tokens, is_compiled=computing.is_compiled)
    again = sizes["nothing"] - sizes[computing.recomputing.of_layers(model.layers)[-1]]
    if computing.recomputing.whole == model.layers:
        again = sizes["nothing"]
    return again + computing.tokens * element * (3 * model.intermediate + (2 + 2 * model.choices) * model.hidden)


def _head(model: Decoder, load: RankLoad, computing: Computing) -> int:
    """Return the bytes that the head's backward pass allocates.

    They are a chunk's float32 logits and their gradient (three times float32 if not compiled), the float32 gradient of
    a trained weight, and the gradient of the hidden states.
    """
    if not model.vocabulary:
        return 0
    element = _element(load)
    logit = _FLOAT + element if computing.is_compiled else 3 * _FLOAT
    of_weight = _FLOAT * model.vocabulary if computing.learning is None else 0  # a frozen head has no gradient
    states = model.hidden * (of_weight + element * computing.tokens)
    return _chunk(computing) * model.vocabulary * logit + states


def _chunk(computing: Computing) -> int:
    """Return the tokens of a chunk: the chunks are as few as possible and of nearly equal length."""
    return -(-computing.tokens // -(-computing.tokens // computing.chunk_tokens))
