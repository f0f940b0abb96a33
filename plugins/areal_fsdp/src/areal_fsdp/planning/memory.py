"""What one rank holds at its fullest moment, from what the code keeps and makes.

The moments that are compared: the head's backward pass, when all activations are there; the backward pass of the last
layer; the end of it, when all gradients are. What layers keep stands in `areal_fsdp.planning.recomputing`.
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
"""Of sharded parameters: the layer that computes, and the one that is fetched meanwhile."""
_FULL: Final = {"activation_checkpointing": "full", "activation_memory_gib": None}
_SELECTIVE: Final = {"activation_checkpointing": "selective", "activation_memory_gib": None}
_BUDGET_STEP = 0.01
"""Budgets of activations are proposed in multiples of so many GiB."""
_CHUNK_ON_CPU = 1024
_SHARE_OF_GPU = 1 / 16
"""Of a GPU's memory, for a chunk's logits and their gradient: 8,192 tokens of 152,000 words on 141 GB. A product over
fewer tokens spends its time on the weight's gradient, which is read and written for each chunk."""
_MOST_STEPS = 4096
_TOKEN_STEP = 1024
"""Budgets of tokens are proposed in multiples of it."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank of the trainer is to hold and compute in a role.

    Attributes:
        description: the model's config.json.
        shapes: of the tensors in its safetensors, by name.
        role: what it is for.
        dtype: what is computed in.
        ranks: over which the model may be sharded.
        tokens: of an update on a rank, at most; None where nobody knows.
        longest: tokens of the longest sequence, as far as the config says.
        gpu_bytes: memory of its GPU, None for a CPU.
        shows_images: whether the model's vision tower computes. If not, its parameters stay as they are.
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
    """Bytes of one rank's device at the moment of a step at which they are most.

    Attributes:
        parameters: that are computed with, their float32 masters, and those that are gathered from other ranks.
        gradients: of parameters.
        optimizer: its state.
        activations: what is kept for the backward pass, and what a layer computes with.
        head: logits, their gradient, and what the head's gradients are summed in.
        resident: of all these, what stays between steps.
        recomputing: the choice of activation checkpointing that was reckoned with, in words; empty where none counts.
        learning: what learns, in words, where that is not the model itself.
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
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


@dataclass(frozen=True, slots=True)
class Computing:
    """How an engine computes.

    Attributes:
        tokens: of a micro-batch.
        rounds: micro-batches of an update; only whether it is one matters.
        is_compiled: layers, head and update.
        recomputing: activation checkpointing.
        chunk_tokens: whose logits exist at once.
        shards: whether parameters are gathered layer by layer, be it from one rank.
        offloads: whether parameters, gradients and optimizer are in host memory.
        moment_bytes: of one element of one of AdamW's two moments, on the device.
        learning: parameters of an adapter, which alone learns; None where all do.
    """

    tokens: int
    rounds: int
    is_compiled: bool
    recomputing: Recomputing
    chunk_tokens: int
    shards: bool
    offloads: bool = False
    moment_bytes: int = _FLOAT
    learning: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryChoices:
    """What an engine's settings say about memory.

    Attributes:
        budget: `max_tokens_per_microbatch`.
        compiles: None for whatever the device is best with.
        checkpointing: `activation_checkpointing`; None for selective where layers are compiled, or else none.
        activations: bytes that layers may keep where checkpointing is selective, None for what is nearly free.
        chunk: `logprob_chunk_tokens`, None for the device's own number.
        offloads: `offload_parameters`, of which a CPU knows nothing.
        half_moments: whether AdamW's moments are in bfloat16.
        offloads_moments: whether they are in host memory, of which a CPU knows nothing either.
        learning: parameters of an adapter, which alone learns; None where all do.
    """

    budget: int
    compiles: bool | None
    checkpointing: Checkpointing | None
    activations: int | None
    chunk: int | None
    offloads: bool
    half_moments: bool
    offloads_moments: bool
    learning: int | None = None

    def recomputing(self, model: Decoder | None, layers: int, dtype: str, *, is_compiled: bool) -> Recomputing:
        """What layers compute again.

        Args:
            model: what a rank has of it, None where its layers are not known.
            layers: of the model.
            dtype: that is computed in.
            is_compiled: whether layers are.

        Raises:
            RunError: there is a budget, and nobody knows what the layers keep.
        """
        sizes = None
        if self.checkpointing == "selective" and self.activations is not None:
            if model is None:
                raise RunError(
                    "activation_memory_gib is a budget for layers of attention and one MLP, and this model has others: "
                    "what they keep is not known",
                    hints=["leave activation_memory_gib out, or set activation_checkpointing=full"],
                )
            sizes = kept_by_a_layer(model, element_bytes(dtype), self.budget, is_compiled=is_compiled)
        mode = self.checkpointing or ("selective" if is_compiled else "none")
        return Recomputing.of(mode, layers, sizes, self.activations)


def chunk_tokens(vocabulary: int, gpu_bytes: int | None) -> int:
    """Tokens whose logits may exist at once: a power of two, by the GPU's memory; on a CPU (None) by its cache."""
    if gpu_bytes is None:
        return _CHUNK_ON_CPU
    tokens = int(gpu_bytes * _SHARE_OF_GPU / (6 * max(1, vocabulary)))  # float32 logits, half-precision gradient
    return max(_CHUNK_ON_CPU, 1 << (tokens.bit_length() - 1)) if tokens else _CHUNK_ON_CPU


def memory_of(load: RankLoad, parallel: ParallelSettings, choices: MemoryChoices) -> Memory | None:
    """The fullest moment, from an engine's settings; None for a model whose layers are not known.

    Args:
        load: of the rank.
        parallel: how ranks divide the work.
        choices: the settings.

    Raises:
        RunError: the ranks cannot divide the model's heads or experts, or a VLM.
    """
    text = text_config(load.description)
    parallel.experts(experts_of(text))  # which, like the others, the engine would refuse
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
    again = choices.recomputing(part, model.layers, load.dtype, is_compiled=is_compiled)
    way = Computing(
        tokens=min(budget, tokens or budget),
        rounds=2 if tokens is None else -(-tokens // budget),
        is_compiled=is_compiled,
        recomputing=again if load.role.trains else Recomputing(),
        chunk_tokens=choices.chunk or chunk_tokens(model.vocabulary, load.gpu_bytes),
        shards=load.ranks > 1 or (choices.offloads and on_gpu),
        offloads=choices.offloads and on_gpu,
        moment_bytes=0 if choices.offloads_moments and on_gpu else _FLOAT // (2 if choices.half_moments else 1),
        learning=choices.learning,
    )
    holders = max(1, load.ranks // (parallel.replicas * parallel.tensor))
    message = again.words(model.layers) if load.role.trains else ""
    if message and (mixers := model.layers - model.attention_layers):
        message += f"; an estimate, {mixers} of {model.layers} layers have no attention"
    peak = peak_memory(part, replace(load, ranks=holders), way)
    beside = [shape for name, shape in load.shapes.items() if not is_of_text(load.description, name)]
    frozen = element_bytes(load.dtype) * sum(map(prod, beside)) // (holders if way.shards else 1)
    return replace(peak, parameters=peak.parameters + frozen, resident=peak.resident + frozen, recomputing=message)


def remedies(need: Callable[..., Memory | None], load: RankLoad, room: int, choices: MemoryChoices) -> list[str]:
    """Which of fewer tokens at once and checkpointing bring a rank below `room` bytes; host memory where neither does.

    Args:
        need: memory with other settings, by keyword.
        load: of the rank; its longest sequence as long as the part that a rank has.
        room: bytes.
        choices: the settings as they are.
    """

    def fits(**changes: Any) -> bool:
        return _total(need(**changes)) <= room

    def words(changes: Mapping[str, Any]) -> str:
        said = {k: "null" if v is None else v for k, v in changes.items() if v is not None or choices.activations}
        return " ".join(f"{key}={value}".lower() for key, value in said.items())

    def largest(**changes: Any) -> int | None:
        place = bisect_left(  # fewer tokens always take less
            budgets, True, key=lambda tokens: fits(max_tokens_per_microbatch=tokens, **changes)
        )
        return budgets[place] if place < len(budgets) else None

    most = choices.budget
    budgets = range((most - 1) // _TOKEN_STEP * _TOKEN_STEP, max(load.longest, _TOKEN_STEP) - 1, -_TOKEN_STEP)
    fewer = largest()
    found = [] if fewer is None else [f"max_tokens_per_microbatch={fewer}"]
    if choices.checkpointing != "full":
        if fits(**_FULL):
            found.append(words(_checkpointing(need, room, choices)))
        elif (both := largest(**_FULL)) is not None:
            found.append(words({**_FULL, "max_tokens_per_microbatch": both}))
    moves: Any = ({key: True, **more} for more in ({}, _FULL) for key in ("offload_optimizer", "offload_parameters"))
    return found or next(([words(move)] for move in moves if fits(**move)), [])


def most_tokens(need: Callable[..., Memory | None], room: int) -> int:
    """Tokens of the largest micro-batch with which a rank stays below `room` bytes, a multiple of 1,024; 0 for none.

    Args:
        need: memory with other settings, by keyword.
        room: bytes.
    """

    def is_too_large(steps: int) -> bool:
        return _total(need(max_tokens_per_microbatch=steps * _TOKEN_STEP)) > room

    return (bisect_left(range(1, _MOST_STEPS + 1), True, key=is_too_large)) * _TOKEN_STEP


def _checkpointing(need: Callable[..., Memory | None], room: int, choices: MemoryChoices) -> dict[str, Any]:
    """What costs the least time of all that fits, where `full` does."""
    if choices.checkpointing == "none" and _total(need(**_SELECTIVE)) <= room:
        return _SELECTIVE
    steps = range(int(room / GIB / _BUDGET_STEP), 0, -1)  # the least of these keeps no more than full does
    budgets = [{**_SELECTIVE, "activation_memory_gib": round(step * _BUDGET_STEP, 2)} for step in steps]
    place = bisect_left(budgets, True, key=lambda budget: _total(need(**budget)) <= room)
    return _FULL if place == len(budgets) or need(**budgets[place]) == need(**_FULL) else budgets[place]


def _total(memory: Memory | None) -> float:
    return inf if memory is None else memory.total


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
            gradients=former + (element + (_FLOAT if way.shards else 0)) * _learning_layer(model, way),
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
    layer = element * tokens * (3 * model.intermediate + (2 + 2 * model.choices) * model.hidden)
    states = element * tokens * model.hidden
    at_head = replace(held, activations=states, head=logits)
    return max(at_head, replace(held, activations=layer), key=lambda moment: moment.total)


def element_bytes(dtype: str) -> int:
    """Of a number that is computed with: bfloat16 or float32."""
    return 2 if dtype == "bfloat16" else _FLOAT


def _element(load: RankLoad) -> int:
    return element_bytes(load.dtype)


def _held(model: Decoder, load: RankLoad, way: Computing) -> Memory:
    """Parameters and optimizer: sharded float32 ones with what is gathered of them, or the whole."""
    role, element, gathered = load.role, _element(load), 0
    stored = _FLOAT if role.changes and way.learning is None else element
    if way.shards:
        gathered = element * (model.root_parameters + _GATHERED_LAYERS * model.largest_layer)
    elif role.changes and way.learning is None and element < _FLOAT:
        stored += element  # what is computed with, beside its master
    count = 0 if way.offloads else model.parameters / load.ranks
    learning = count if way.learning is None else 0 if way.offloads else way.learning / load.ranks
    own = 0 if way.learning is None else learning * (_FLOAT + element)  # masters, and what is computed with
    parameters, optimizer = round(stored * count + own), round(2 * way.moment_bytes * learning) if role.trains else 0
    return Memory(parameters + gathered, 0, optimizer, 0, 0, resident=parameters + optimizer)


def _gradients(model: Decoder, load: RankLoad, way: Computing) -> tuple[int, int]:
    """Gradients at the beginning and at the end of the last micro-batch's backward pass.

    Those of several micro-batches add up in float32, shard by shard as they come. Of a single one they stay as the
    backward pass made them, where the update is compiled and nothing is sharded.
    """
    learning = model.parameters if way.learning is None else way.learning
    whole = _FLOAT * learning
    added = whole if not way.shards else 0 if way.offloads else round(whole / load.ranks)
    if way.rounds > 1:
        return added, added
    is_fused = way.is_compiled and way.moment_bytes > 0  # moments elsewhere are not updated by the masters' own kernel
    return 0, added if way.shards or not is_fused else _element(load) * learning


def _learning_layer(model: Decoder, way: Computing) -> int:
    """Parameters that learn of the largest layer; of an adapter nearly an equal share of all."""
    return model.largest_layer if way.learning is None else way.learning // model.layers


def kept_activations(model: Decoder, load: RankLoad, way: Computing) -> int:
    """Activations of all layers, the last hidden states before and behind their norm."""
    sizes = kept_by_a_layer(model, _element(load), way.tokens, is_compiled=way.is_compiled)
    return way.recomputing.kept(model.layers, sizes) + 2 * _element(load) * model.hidden * way.tokens


def _of_a_layer(model: Decoder, load: RankLoad, way: Computing) -> int:
    """What the last layer's backward pass makes: its activations, where they are computed again, and their gradients.

    The first layers, of which more may be computed again, come when the others' activations are gone.
    """
    element = _element(load)
    sizes = kept_by_a_layer(model, element, way.tokens, is_compiled=way.is_compiled)
    again = sizes["nothing"] - sizes[way.recomputing.of_layers(model.layers)[-1]]
    if way.recomputing.whole == model.layers:
        again = sizes["nothing"]
    return again + way.tokens * element * (3 * model.intermediate + (2 + 2 * model.choices) * model.hidden)


def _head(model: Decoder, load: RankLoad, way: Computing) -> int:
    """The head's backward pass: a chunk's float32 logits and their gradient (where nothing is compiled, three times
    float32); the weight's gradient, which is summed in float32, where it learns; the hidden states' own."""
    if not model.vocabulary:
        return 0
    element = _element(load)
    logit = _FLOAT + element if way.is_compiled else 3 * _FLOAT
    of_weight = _FLOAT * model.vocabulary if way.learning is None else 0  # nobody computes a frozen head's
    states = model.hidden * (of_weight + element * way.tokens)
    return _chunk(way) * model.vocabulary * logit + states


def _chunk(way: Computing) -> int:
    """Tokens of a chunk: as few chunks as possible, of nearly the same length."""
    return -(-way.tokens // -(-way.tokens // way.chunk_tokens))
