"""Inference engines: what the rollout controller asks of them, and the requests, slots and weights that pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areal_core.errors import RunError
from areal_core.exports import renamed_method

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from areal_core.data.trajectory import Generation
    from areal_core.interfaces.model import ModelReference

UpdateMode = Literal["keep_cache", "recompute"]
"""Whether a weight update keeps the keys and values of live requests, or has them recomputed under the new weights. In
`recompute`, behavior log-probabilities are exact for the token's version. In `keep_cache`, tokens after an update
attend to keys and values of older weights."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling settings of a request.

    Attributes:
        temperature: divides the logits; above 0.
        max_new_tokens: largest number of generated tokens.
        min_new_tokens: number of tokens before which no stop token is drawn.
        stop_token_ids: a generation ends after one of these tokens, which is part of the output.
        greedy: take the most probable token. Log-probabilities are still those of the tempered distribution.
        top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, stop: as servers name them; the
            defaults switch them off. `InferenceCapabilities.sampling` has those that an engine serves.
        top_logprobs: number of likeliest tokens whose log-probabilities are returned for each new token (see
            `Generation.top_logprobs`). They are those of the distribution from which the token is drawn. 0: none.
        prompt_logprobs: whether the log-probabilities of the prompt's tokens are returned (see
            `Generation.prompt_logprobs`). They are those of temperature 1 and of the whole distribution, whatever the
            other settings. A prompt with images has none.

    Example:
        >>> from areal_core.servers import SamplingParameters
        >>> sampling = SamplingParameters(max_new_tokens=64, top_p=0.9, stop=("END",))
        >>> sampling.unsupported({"top_p", "top_k"})
        ['stop']
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def unsupported(self, honored: Collection[str] = ()) -> list[str]:
        """Return the settings that are switched on and that an engine does not serve.

        Args:
            honored: the optional settings that it serves.
        """
        return [name for name, default in _OPTIONAL if getattr(self, name) != default and name not in honored]

    def check(self) -> None:
        """Check the temperature and the numbers of tokens.

        Raises:
            ValueError: one of them is out of range.
        """
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, it must be a finite number above 0")
        if self.max_new_tokens < 1 or not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and min_new_tokens {self.min_new_tokens}; "
                "at least one token is generated, and at most max_new_tokens"
            )


_OPTIONAL = [
    (setting.name, setting.default)
    for setting in fields(SamplingParameters)
    if setting.name not in {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy"}
]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        request_id: unique in the run.
        input_ids: the prompt and everything after it so far; a sequence of integers.
        sampling: sampling settings, shared by many requests.
        seed: seed of this sample. If the engine is seeded, the same seed, weights and prompt give the same tokens.
        affinity: requests with the same affinity share a prefix, as the samples of a group do. They are preferably
            served by one server.
        conversation: name shared by requests that continue one another, such as the turns of an episode. In
            `keep_cache`, a conversation keeps the keys and values of its prefix over a weight update, and a new
            conversation starts with those of the current weights. In `recompute`, none outlives an update. Empty: the
            request is a conversation of its own.
        images: image files, such as PNG, in base64, in the order in which they occur in `input_ids`. There, each image
            is a run of the model's image tokens, one per patch.
        on_slot_change: called in the caller's event loop: with False when the request waits for a slot, at first or
            after it has lost one, and with True when it has got one. It is not called after the answer. The time of an
            episode is stopped while one of its requests waits.
        on_tokens: called in the caller's event loop with the next tokens of the answer, as they arrive. They are a part
            of the answer, or the request fails. It is not called for a request that another server could not continue;
            see `is_resumable`.

    Example:
        >>> from areal_core.servers import GenerationRequest, SamplingParameters
        >>> request = GenerationRequest("group-0.1", [5, 7, 9], SamplingParameters(max_new_tokens=64), seed=1)
        >>> request.check(vocabulary=1000, limit=32, limited_by="the servers take")
        Traceback (most recent call last):
            ...
        ValueError: request group-0.1 wants 67 tokens (3 of prompt and 64 new ones), but the servers take 32 tokens
    """

    request_id: str
    input_ids: Sequence[int]
    sampling: SamplingParameters
    seed: int
    affinity: str = ""
    conversation: str = ""
    images: tuple[str, ...] = ()
    on_slot_change: Callable[[bool], None] = field(default=lambda _: None, repr=False, compare=False)
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, repr=False, compare=False)

    def check(self, vocabulary: int, limit: int, limited_by: str) -> None:
        """Check what an engine cannot serve. A token outside of the vocabulary, for example, would end most engines.

        Args:
            vocabulary: number of token ids.
            limit: largest number of tokens of prompt and answer together.
            limited_by: subject and verb before the limit in the error, such as "the servers take".

        Raises:
            ValueError: the prompt is empty, has an unknown token, or is too long for the tokens that are requested. Or
                the request wants `prompt_logprobs` of a prompt with images.
        """
        from areal_core.data.tokens import TokenIds  # imports NumPy, which reading a config does not need

        prompt, new = TokenIds.of(self.input_ids), self.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"request {self.request_id} has no input tokens")
        if self.images and self.sampling.prompt_logprobs:
            raise ValueError(
                f"request {self.request_id} has images and prompt_logprobs, but the tokens of an image have no "
                "log-probabilities"
            )
        low, high = prompt.bounds()
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(
                f"request {self.request_id} has token {wrong}, the model's vocabulary has {vocabulary} tokens"
            )
        if len(prompt) + new > limit:
            raise ValueError(
                f"request {self.request_id} wants {len(prompt) + new} tokens ({len(prompt)} of prompt and {new} new "
                f"ones), but {limited_by} {limit} tokens"
            )


class ServerLostError(Exception):
    """The server is unreachable, too slow, closed the connection, or its answer is malformed. Try another server."""


class ServerUnreachableError(ServerLostError):
    """The server's address refuses connections: its program has ended. Trying it again is useless."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request for a slot, for one partial generation.

    Attributes:
        prefixes: names of prefixes that a server may have cached, the longest first. Their server is preferred unless
            it has much more to do than others.
        avoided: names of servers that are used only if no other is ready.
        is_continued: whether the generation has had a slot before. Then it goes to the front of the queue.
        is_resumable: whether another server can continue behind the tokens so far. If not, it starts from the prompt.
    """

    prefixes: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    is_continued: bool = False
    is_resumable: bool = True


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot of a server under a weight version, for one partial generation.

    Attributes:
        server, address: name and address of the server.
        version: version of its weights. If it does not label tokens, they do not change while the slot is leased.
        run_id: prefix of the versions in the server's labels, so that the labels of another run are not accepted.
        labels_tokens: whether an answer reports which of its tokens were sampled by which version.
        context: longest sequence that the server takes, in tokens.
        vocabulary: number of the model's token ids.
        adapter: name under which the server has the weights; empty for the model's own name.
    """

    server: str
    address: str
    version: int
    run_id: str
    labels_tokens: bool
    context: int
    vocabulary: int
    adapter: str = ""


class LeaseHolder(Protocol):
    """Waits for a slot, and then leases it until `Slots.release`."""

    def give(self, grant: Grant) -> None:
        """Receive the slot."""

    def fail(self, error: RunError) -> None:
        """Receive the reason why there will never be a slot."""

    def lose(self) -> None:
        """Learn that the server is lost: requests to it will not be answered."""


class Slots(Protocol):
    """Leases slots of servers: the pool itself, or a connection to the controller that has it."""

    @abstractmethod
    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """Put a request into the queue. The holder gets the slot, or the reason why there is none."""

    @abstractmethod
    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """Return a slot, or leave the queue.

        Args:
            holder: the holder of `acquire`.
            has_failed: whether the server failed from the holder's view. The pool checks the server before it counts
                as lost, for the failure may be the worker's own.
        """


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a model: its name in the model's safetensors, its dtype as PyTorch names it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A tensor's location in the memory of a GPU, for one process that reads it there (CUDA IPC).

    The values are those of `torch.multiprocessing.reductions.reduce_tensor`, with bytes as hexadecimal digits.

    Attributes:
        gpu: number of the GPU, as in `placement`.
        device: UUID of the GPU.
        handle, size, offset: the allocation that holds the tensor's storage, and the storage's offset in it, in bytes.
        start: index of the tensor's first element in the storage.
        counter, counter_offset: the reference counter with which the reader releases the memory.

    Example:
        >>> from areal_core.engines import SharedMemory, SharedTensor, TensorDescription
        >>> handles = {"handle": "00a1", "size": 2048, "offset": 0, "start": 0, "counter": "00b2", "counter_offset": 0}
        >>> copies = tuple(SharedMemory(gpu, f"GPU-{gpu}f3c", **handles) for gpu in (0, 1))
        >>> shared = SharedTensor(TensorDescription("norm.weight", "bfloat16", (1024,)), copies)
        >>> next(copy.device for copy in shared.copies if copy.gpu == 1)  # where the server on GPU 1 reads
        'GPU-1f3c'
    """

    gpu: int
    device: str
    handle: str
    size: int
    offset: int
    start: int
    counter: str
    counter_offset: int


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A whole, contiguous tensor of a model in the memory of the trainer's GPUs, once on each GPU where it is read."""

    tensor: TensorDescription
    copies: tuple[SharedMemory, ...]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights for the engine.

    Attributes:
        version: number of the weight sync, never reused in a run.
        path: folder with a complete `model.safetensors`, which stays until the update returns. None if the trainer
            broadcasts the weights, or the engine has read them all from GPU memory.
        tensors: the tensors that are broadcast, in this order, or were read.

    Example:
        >>> import torch
        >>> from areal_core.engines import TensorDescription, WeightUpdate
        >>> update = WeightUpdate(3, path=None, tensors=(TensorDescription("norm.weight", "bfloat16", (1024,)),))
        >>> for tensor in update.tensors:  # a buffer for each tensor that the trainer broadcasts
        ...     torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)).nbytes
        2048
    """

    version: int
    path: Path | None
    tensors: tuple[TensorDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class InferenceCapabilities:
    """What an engine can do. A config that needs more is refused before the run starts.

    Attributes:
        update_modes: update modes that it offers.
        sampling: optional fields of `SamplingParameters` that it serves, those after `greedy`.
        deterministic: whether the same requests one after another give the same bits.
        seeded: whether a request's seed decides its tokens.
        transports: how weights may reach it besides folders, as `plugin/name`: `core/broadcast` needs
            `InferenceEngine.form_group`, `core/ipc` needs `sleep` and `read_tensors`. An adapter needs `receive` for
            the first, `sleep` and `read` for the second.
        images: whether requests may have images.
    """

    update_modes: frozenset[UpdateMode]
    sampling: frozenset[str] = field(default_factory=frozenset)
    deterministic: bool = False
    seeded: bool = True
    transports: frozenset[str] = field(default_factory=frozenset)
    images: bool = False


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """The process group in which the trainer broadcasts weights to the engine.

    Attributes:
        name: new for each group.
        world_size: number of members, including rank 0, the trainer.
        prefixes: prefixes of the keys in the group's store, outermost first.
        is_new: whether the trainer still has to join.

    Example:
        >>> from areal_core.engines import BroadcastGroup
        >>> from torch.distributed import HashStore, PrefixStore
        >>> group = BroadcastGroup("areal-1f2e", world_size=3, prefixes=("areal-1f2e", "cuda"), is_new=True)
        >>> root = store = HashStore()
        >>> for prefix in group.prefixes:  # the members meet in a store below these prefixes
        ...     store = PrefixStore(prefix, store)
        >>> store.set("0", "the address of rank 0")
        >>> root.get("areal-1f2e/cuda/0")
        b'the address of rank 0'
    """

    name: str
    world_size: int
    prefixes: tuple[str, ...]
    is_new: bool


class InferenceEngine(Slots, ABC):
    """Generates, and takes new weights while it does. Lives in the rollout controller's event loop.

    Tokens do not pass through it: rollout workers, each with a `client`, acquire slots (`Slots`) and ask the servers
    themselves.

    For inference servers write a `ServerAdapter` instead: `ServerFleet` is the engine around it. Derive from this class
    for an engine without servers.

    A run constructs the engine with its settings and with those of these arguments that its constructor names:
    `scratch`, a private folder for sockets; `member`, this process in the run (`areal_core.processes.Member`; None
    outside of a run); `log_dir`; `gpus`, the numbers of the GPUs that it may use, or None; `deterministic`, as in the
    config. Constructing it starts nothing.

    A subclass implements `start`, `generate`, `client`, `acquire`, `release` and `update_weights`. The other methods
    have defaults, those of an engine with one copy of the weights that it reads from a folder. Override them for
    broadcasts (`form_group`, `needs_folder`, `offer_folder`), for GPUs shared with the trainer (`sleep`,
    `read_tensors`), or for messages of your own (`answer`).

    Example:
        >>> import asyncio
        >>> from pathlib import Path
        >>> from areal_core.data import FinishReason, Generation
        >>> from areal_core.engines import ModelReference, WeightUpdate
        >>> from areal_core.servers import GenerationRequest, Grant, InferenceCapabilities, InferenceClient
        >>> from areal_core.servers import InferenceEngine, SamplingParameters, SlotLease, SlotRequest
        >>> class Client(InferenceClient):  # repeats the last token of the prompt; a real one asks `grant.address`
        ...     capabilities = InferenceCapabilities(frozenset({"recompute"}))
        ...
        ...     def __init__(self, slots):
        ...         self._slots = slots
        ...
        ...     async def generate(self, request):
        ...         async with SlotLease(self._slots, SlotRequest(), request.on_slot_change) as grant:
        ...             count = request.sampling.max_new_tokens
        ...             ids, versions = [request.input_ids[-1]] * count, [grant.version] * count
        ...             return Generation(ids, [0.0] * count, versions, FinishReason.LENGTH)
        >>> class Engine(InferenceEngine):
        ...     capabilities = Client.capabilities
        ...
        ...     async def start(self, model):
        ...         self.version = 0
        ...
        ...     async def generate(self, request):
        ...         return await self.client(self, None).generate(request)
        ...
        ...     def client(self, slots, model):
        ...         return Client(slots)
        ...
        ...     def acquire(self, request, holder):  # every request gets a slot immediately
        ...         holder.give(Grant("server-0", "", self.version, "", True, context=4096, vocabulary=1000))
        ...
        ...     def release(self, holder, *, has_failed=False):
        ...         pass
        ...
        ...     async def update_weights(self, update):
        ...         self.version = update.version
        >>> async def use(engine):
        ...     await engine.start(ModelReference("/models/tiny"))
        ...     await engine.update_weights(WeightUpdate(1, Path("/weights/1")))
        ...     return await engine.generate(GenerationRequest("0.1", [5, 7], SamplingParameters(max_new_tokens=2), 0))
        >>> asyncio.run(use(Engine()))
        Generation([7, 7], [0.0, 0.0], [1, 1], <FinishReason.LENGTH: 1>)
    """

    capabilities: InferenceCapabilities

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        renamed_method(cls, "take_metrics", "pop_metrics")

    @abstractmethod
    async def start(self, model: ModelReference) -> None:
        """Load the model. On return the engine generates with its weights as version 0.

        Raises:
            RunError: the engine cannot start; the message carries its own output.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue one sequence. Cancelling the caller's task cancels the request in the engine.

        Raises:
            ValueError: the request cannot be served (too long, an unsupported setting).
            RunError: the engine has died.
        """

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """Answer the same request from every copy of the weights that the engine has. Raises as `generate` does.

        Default: one copy.
        """
        return [await self.generate(request)]

    @abstractmethod
    def client(self, slots: Slots, model: ModelReference) -> InferenceClient:
        """Return what a rollout worker generates with. Called on an engine of the worker's own, which never starts.

        Args:
            slots: acquires slots from the engine in the controller, over the worker's connection.
            model: the run's model.
        """

    @abstractmethod
    async def update_weights(self, update: WeightUpdate) -> None:
        """Change the weights under the requests in flight. On return every further token is of `update.version`.

        Requests continue. Each token keeps the label of the version that sampled it.

        Raises:
            RunError: the weights were not taken over; nothing may be generated with half of them.
        """

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """Agree on a process group for the next broadcast. Called if `capabilities.transports` has `core/broadcast`.

        Args:
            address, port: where the trainer serves the store of a new group.
            backend: `nccl` or `gloo`.
            current_group: name of the group that the trainer is in, empty for none. The group is kept if it still fits.

        Returns:
            The group, whose other members are joining if it is new. None if no server can receive, which is the
            default.
        """
        return None

    def needs_folder(self) -> bool:
        """Return whether a server missed the last update and waits for the same weights in a folder.

        Default: none did.
        """
        return False

    def offer_folder(self, update: WeightUpdate) -> None:
        """Give servers that missed a broadcast the same version in a folder. Default: no server waits for one."""

    def leave_out(self, names: Sequence[str]) -> None:
        """Expect no update of these tensors of the model's files: the trainer does not hold them.

        Called before the first update. Default: the engine does not compare an update with the model's tensors.
        """

    async def sleep(self) -> None:
        """Free the GPU memory until the next `update_weights`. Called if the settings' `gives_memory` is true.

        Requests keep the tokens that they have, and wait for a slot until then.

        Raises:
            RunError: the engine cannot; this is the default.
        """
        raise RunError("this inference engine cannot free its GPU memory")

    async def read_tensors(self, version: int, tensors: Sequence[SharedTensor]) -> Sequence[int]:
        """Copy a part of the weights of a version from the memory of the trainer's GPUs.

        Called between `sleep` and `update_weights` if `capabilities.transports` has `core/ipc`. The first call has no
        tensors: it takes the engine's memory back and returns who will read.

        Returns:
            The GPUs, as in `placement`, on which the next part will be read. On each of them every copy of this part
            has been opened. A copy is released as soon as its reader has finished with it.

        Raises:
            RunError: no server reads, and why; this is the default.
        """
        raise RunError("this inference engine does not read weights in GPU memory")

    async def answer(self, message: object) -> object:
        """Return the reply to a message of the plugin's own, which came through the run's driver.

        Raises:
            RunError: the engine does not know the message, or cannot answer it; this is the default.
        """
        raise RunError(f"this process does not answer {type(message).__name__}")

    def describe(self) -> str:
        """Return the engine's state in a few words for the live view. Default: empty, nothing is shown."""
        return ""

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call: counts since then, latest durations. Default: none.

        areal logs them with the prefix `servers/`, unless a name has it already or begins with `weight_sync/`.
        """
        return {}

    async def close(self) -> None:
        """Stop, cancel what runs and free everything. Safe to call twice. Default: there is nothing to free."""


class InferenceClient(Protocol):
    """Generates in a rollout worker: acquires a slot, then asks its server for tokens."""

    capabilities: InferenceCapabilities

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""

    async def close(self) -> None:
        """Close the connections to servers."""
