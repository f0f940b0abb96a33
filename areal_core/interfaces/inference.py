"""What the rollout controller asks of an engine that generates."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from areal_core.data.trajectory import Generation
    from areal_core.errors import RunError
    from areal_core.interfaces.model import ModelReference

UpdateMode = Literal["keep_cache", "recompute"]
"""What becomes of the keys and values of live requests when weights change under them: kept, or rebuilt under the new
weights. Behavior log-probabilities are exact for the token's version in `recompute`; in `keep_cache` tokens after an
update attend to keys and values of older weights."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it, above 0.
        max_new_tokens: at most so many tokens are generated.
        min_new_tokens: the stop tokens are not drawn before.
        stop_token_ids: a generation ends behind one of these; the token itself is part of the output.
        greedy: take the most probable token; log-probabilities are still those of the tempered distribution.
        top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, stop: as servers name them, with
            the values that switch them off; an engine that cannot serve one says so in its capabilities.
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

    def unsupported(self, honored: Collection[str] = ()) -> list[str]:
        """Names of the settings that are switched on and that not every engine honors, nor one that honors these."""
        return [name for name, default in _NOT_EVERYWHERE if getattr(self, name) != default and name not in honored]

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            ValueError: the temperature or a number of tokens is out of range.
        """
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, it must be a finite number above 0")
        if self.max_new_tokens < 1 or not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and min_new_tokens {self.min_new_tokens}; "
                "at least one token is generated, and at most max_new_tokens"
            )


_NOT_EVERYWHERE = [
    (setting.name, setting.default)
    for setting in fields(SamplingParameters)
    if setting.name not in {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy"}
]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        request_id: unique in the run.
        input_ids: prompt and everything after it so far; a sequence of integers.
        sampling: shared by many requests.
        seed: of this sample's random numbers; where the engine is seeded, the same seed, weights and prompt give the
            same tokens.
        affinity: requests with the same affinity share a prefix, such as the siblings of a group; they are better
            served in one place.
        conversation: requests of one conversation, such as the turns of an episode, continue one another. In
            `keep_cache` a conversation keeps the keys and values of its prefix over a weight update, and a new
            conversation begins with those of the current weights alone; in `recompute` none outlives an update.
            Empty: the request is a conversation by itself.
        images: the files of its images, such as PNG, in base64, in the order of their places in `input_ids`; each
            place is as many of the model's image tokens as the image has.
        on_slot: called in the caller's event loop. With False when the request waits for a slot of a server, at first
            or after it has lost one; then with True when it has got it. Nothing is told behind the answer. The time of
            an episode goes by only while none of its requests waits.
    """

    request_id: str
    input_ids: Sequence[int]
    sampling: SamplingParameters
    seed: int
    affinity: str = ""
    conversation: str = ""
    images: tuple[str, ...] = ()
    on_slot: Callable[[bool], None] = field(default=lambda _: None, repr=False, compare=False)

    def check(self, vocabulary: int, limit: int, limited_by: str) -> None:
        """Refuse what an engine cannot serve; a token outside of the vocabulary would end most of them.

        Args:
            vocabulary: how many tokens there are.
            limit: of prompt and new tokens together.
            limited_by: in words that go in front of the limit.

        Raises:
            ValueError: it has no tokens, one that there is not, or asks for too many.
        """
        from areal_core.data.tokens import TokenIds  # NumPy, which whoever reads a config does without

        prompt, new = TokenIds.of(self.input_ids), self.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"request {self.request_id} has no input tokens")
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
    """The server could not be reached, broke off, was too slow or answered nonsense: ask another one."""


class ServerUnreachableError(ServerLostError):
    """The server's address refused the connection: its program has ended, and a second request is useless."""


@dataclass(frozen=True, slots=True)
class Want:
    """A partial generation that waits for a slot.

    Attributes:
        prefixes: names of what may lie on a server already, the longest first; it goes there where that is no detour.
        avoided: names of servers that are given to it only where no other is ready.
        is_continued: it had a slot before, and so came before all who wait.
        can_go_on: whether another server may go on with the tokens that this one has made; else it begins anew.
    """

    prefixes: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    is_continued: bool = False
    can_go_on: bool = True


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot of a server under a weight version, for one partial generation.

    Attributes:
        server, address: whom to ask.
        version: of its weights. Where it does not label tokens itself, they do not change while the slot is held.
        run_id: of this run, in front of the versions in the server's labels, so that no other run's are believed.
        labels_tokens: whether an answer says which of its tokens were sampled by which version.
        context: the longest sequence that it takes, in tokens.
        vocabulary: how many token ids its model has.
        adapter: name under which it knows the weights; empty for the model's own.
    """

    server: str
    address: str
    version: int
    run_id: str
    labels_tokens: bool
    context: int
    vocabulary: int
    adapter: str = ""


class SlotHolder(Protocol):
    """Who waits for a slot, and then has it until it gives it back."""

    def give(self, grant: Grant) -> None:
        """Here it is."""

    def fail(self, error: RunError) -> None:
        """There will never be one."""

    def lose(self) -> None:
        """The server of the slot is lost: what was asked there is answered no more."""


class Slots(Protocol):
    """Where slots of servers come from: from the pool itself, or over a connection from the controller."""

    def acquire(self, want: Want, holder: SlotHolder) -> None:
        """Line up for a slot."""

    def release(self, holder: SlotHolder, *, has_failed: bool = False) -> None:
        """The slot, or the place in the line, is not needed any more.

        Args:
            holder: who lined up.
            has_failed: whether its holder says that the server failed; whether it is lost by that is the pool's to say.
        """


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a model: its name in the model's safetensors, dtype as PyTorch names it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where a tensor lies in the memory of a GPU, for one process that reads it there (CUDA IPC).

    Texts and numbers are what `torch.multiprocessing.reductions.reduce_tensor` tells, bytes as hexadecimal digits.

    Attributes:
        gpu: number of the GPU, as in `placement`.
        device: its UUID.
        handle, size, offset: of the memory that holds the tensor's storage, and the storage's place in it, in bytes.
        start: the tensor's first element in the storage.
        counter, counter_offset: how the reader says that it is done.
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
    """Weights for the engine to take over.

    Attributes:
        version: counts weight syncs, never reused in a run.
        path: a folder with `model.safetensors`, complete when announced; it stays until the update returns. None
            where the trainer broadcasts to the group that stands, or where all of them have been read already.
        tensors: what is broadcast, in this order, or was read.
    """

    version: int
    path: Path | None
    tensors: tuple[TensorDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class InferenceCapabilities:
    """What an engine can do, so that a config which asks for more is refused before the run starts.

    Attributes:
        update_modes: the in-flight update modes that it offers.
        sampling: names of `SamplingParameters` fields, beyond temperature, lengths and stop tokens, that it honors.
        deterministic: whether the same requests one after another give the same bits.
        seeded: whether a request's seed decides its tokens.
        transports: how weights may reach it beside folders, as `plugin/name`: `core/broadcast` is for a
            `BroadcastReceiver`, `core/ipc` for a `TensorReader`.
        images: whether requests may have images.
    """

    update_modes: frozenset[UpdateMode]
    sampling: frozenset[str] = field(default_factory=frozenset)
    deterministic: bool = False
    seeded: bool = True
    transports: frozenset[str] = field(default_factory=frozenset)
    images: bool = False


class InferenceEngine(Slots, Protocol):
    """Servers that generate, and whose weights change while they do. Lives in the rollout controller's event loop.

    Tokens do not pass through it: rollout workers, each with a `client`, are given slots (`Slots`) and ask servers
    themselves.

    Made, starting nothing, with its settings and those of these that its constructor names: `scratch`, a private folder
    for sockets; `member`, this process in the run (`areal_core.runs.Member`; None where somebody only asks what it can
    do); `log_dir`; `gpus`, the numbers of those that it may use, or None; `deterministic`, as in the config.
    """

    capabilities: InferenceCapabilities

    async def start(self, model: ModelReference) -> None:
        """Load the model and be ready to generate with its weights as version 0.

        Raises:
            RunError: it cannot start; the message carries the engine's own words.
        """

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue one sequence. Cancelling the caller's task cancels the request in the engine.

        Raises:
            ValueError: the request cannot be served (too long, an unsupported setting).
            RunError: the engine has died.
        """

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """The same request answered by every copy of the weights that the engine has. Raises as `generate`."""

    def client(self, slots: Slots, model: ModelReference) -> InferenceClient:
        """What a rollout worker generates with. It is asked of an engine that was made in the worker and never starts.

        Args:
            slots: over the connection to the controller, which asks the engine there.
            model: of the run.
        """

    async def update_weights(self, update: WeightUpdate) -> None:
        """Change the weights under the requests in flight; on return every further token is of `update.version`.

        Requests continue; each token keeps the label of the version that sampled it.

        Raises:
            RunError: the weights could not be taken over; nothing may be generated with half of them.
        """

    def describe(self) -> str:
        """How it is now, in a few words for the live view; empty where there is nothing to tell."""

    def take_metrics(self) -> dict[str, float]:
        """What happened since this was last asked: counts are those since then, durations the latest."""

    async def close(self) -> None:
        """Stop, cancel what runs and free everything; safe to call twice."""


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """The group that stands between trainer and engine.

    Attributes:
        name: new for each group.
        world_size: members, the trainer's rank 0 included.
        prefixes: of the keys in the group's store, outermost first.
        is_new: whether the trainer still has to join.
    """

    name: str
    world_size: int
    prefixes: tuple[str, ...]
    is_new: bool


class InferenceClient(Protocol):
    """What rollout workers generate with: asks for a slot, and the server for tokens."""

    capabilities: InferenceCapabilities

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""

    async def close(self) -> None:
        """Close the connections to servers."""


class BroadcastReceiver(Protocol):
    """What an inference engine offers beyond `InferenceEngine` where weights can be broadcast to it."""

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """Agree on a group for the next update.

        Args:
            address, port: where the trainer serves the store of a new group.
            backend: `nccl` or `gloo`.
            current_group: name of the group that the trainer is in, empty for none; it is kept where it still fits.

        Returns:
            The group; if it is new its other members are joining. None where nobody could receive.
        """

    def needs_folder(self) -> bool:
        """Whether somebody missed the last update and waits for the same weights in a folder."""

    def offer_folder(self, update: WeightUpdate) -> None:
        """Weights of a version that was broadcast already, in a folder, for those who missed it."""


class MemorySharer(Protocol):
    """What an inference engine offers beyond `InferenceEngine` where `gives_memory` of its settings is true."""

    async def sleep(self) -> None:
        """Stop, keep what every request has so far, and give the memory away until the next `update_weights`.

        The requests wait for a slot meanwhile.
        """


class TensorReader(Protocol):
    """What a `MemorySharer` offers beyond where it reads weights in the memory of the trainer's GPUs."""

    async def read_tensors(self, version: int, tensors: Sequence[SharedTensor]) -> Sequence[int]:
        """Take over a part of the weights of a version, between `sleep` and `update_weights`.

        A first call without tensors takes the engine's memory back and says who will read.

        Returns:
            The GPUs, as in `placement`, on which the next part will be read. Every copy of this part has been opened
            where its GPU is among them, and is let go as soon as the reader's last copy of it is done.

        Raises:
            RunError: nobody reads; says why.
        """


class Questioned(Protocol):
    """What an inference engine offers beyond `InferenceEngine` where others may ask it things while a run goes on."""

    async def answer(self, message: object) -> object:
        """The reply to a message of the plugin's own, which came through the run's driver.

        Raises:
            RunError: the message is not known, or cannot be answered.
        """
