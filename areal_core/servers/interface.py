"""What an adapter for one kind of inference server must do; what servers share is in `areal_core.servers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import TokenIds
    from areal_core.data.trajectory import Values
    from areal_core.interfaces import InferenceCapabilities, SamplingParameters, TensorDescription, UpdateMode
    from areal_core.interfaces.model import ModelReference


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server process is started.

    Attributes:
        arguments: of the operating system, the program first.
        environment: added to the run's own.
        health_path: answers as soon as the server serves; see `HTTPAdapter`.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server says of itself.

    Attributes:
        version: of the server program.
        model: the model that it serves, as it names it.
        context: the longest sequence that it takes, prompt and output together, in tokens.
        slots: how many requests it works on at once.
        dtype: of its parameters, as PyTorch names it; empty where the server does not say.
        ranks: processes that hold a share of the weights: tensor times data parallelism.
        reports_spans: whether an answer says which of its tokens were sampled by which version. Where it does not,
            a weight update stops the requests under way, and they are continued afterwards.
    """

    version: str
    model: str
    context: int
    slots: int
    dtype: str = ""
    ranks: int = 1
    reports_spans: bool = True


@dataclass(frozen=True, slots=True)
class PartialGeneration:
    """What one server is asked for: a request, or what is left of one.

    Attributes:
        name: unique among everything that the fleet ever asked; servers write it into their logs.
        input_ids: prompt and all tokens so far; as it is part of a body for `ServerConnection`.
        sampling: with the lengths that are left.
        seed: of this partial generation.
        cache_salt: prefixes may be shared only between partial generations of the same key.
        images: files of its images in base64, as in `GenerationRequest`.
        adapter: see `Grant`.
    """

    name: str
    input_ids: TokenIds
    sampling: SamplingParameters
    seed: int
    cache_salt: str
    images: tuple[str, ...] = ()
    adapter: str = ""


class Span(msgspec.Struct, gc=False):
    """Tokens of one label, as SGLang and vLLM write them; `msgspec.structs.astuple` makes it one of `Chunk.spans`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens as they arrive.

    Attributes:
        output_ids, logprobs: of new tokens, equally long: lists, or arrays of type q and f.
        finish: why the server will send nothing further; None while it goes on. `abort`: somebody stopped it.
        spans: (label, start, end) over all tokens so far; None where the server has none. A partial generation that
            breaks off keeps the tokens of the latest ones.
        columns: on the last chunk, of all tokens of the partial generation, its input's among them; see `Generation`.
    """

    output_ids: Iterable[int]
    logprobs: Iterable[float]
    finish: Literal["stop", "length", "abort"] | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    columns: Mapping[str, Values] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group of processes in which rank 0, the trainer, broadcasts weights to servers.

    Attributes:
        name: new for each group.
        address, port: of the store through which its members meet; the trainer serves it.
        world_size: members.
        backend: `nccl` or `gloo`.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


class Connection(Protocol):
    """To one server, of the adapter's own class.

    Attributes:
        address: of the server.
    """

    address: str

    def close(self) -> None:
        """Break off everything under way; what is asked next opens it again."""


class GenerationAdapter(Protocol):
    """The half of a `ServerAdapter` that rollout workers use: it asks a server for tokens."""

    def capabilities(self) -> InferenceCapabilities:
        """What servers of this kind can do."""

    def connect(self, address: str, settings: Any) -> Connection:
        """A connection that opens when something is asked, which is when it fails.

        Args:
            address: of the server.
            settings: of the fleet.
        """

    def generate(self, connection: Any, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Ask for a partial generation and yield what arrives; the last chunk has a `finish`."""


class ServerAdapter(GenerationAdapter, Protocol):
    """Speaks the language of one kind of server. Holds no state of any server; everything goes through a connection.

    What it has beyond a `GenerationAdapter` the rollout controller uses. Every method that asks a server may raise
    `ServerLostError` and `RequestRefusedError`; see `areal_core.servers.errors`. Adapters for HTTP derive from
    `areal_core.servers.connection.HTTPAdapter`.
    """

    name: str
    """Of the server program, for people."""

    group_store_prefixes: Mapping[str, Sequence[str]]
    """By backend: the prefixes of the keys under which this server meets others in a group's store, outermost first;
    `{group}` stands for the group's name. Empty where the server cannot receive a broadcast."""

    def serve(self, model: ModelReference) -> None:
        """Requests are for this model.

        Raises:
            RunError: servers of this kind, as they are set, cannot serve it.
        """

    async def check_health(self, connection: Any, timeout_s: float) -> None:
        """Return while the server lives. It is asked during updates and while the server's memory is given away, so it
        must neither generate nor hold an update up."""

    async def identify(self, connection: Any) -> ServerIdentity:
        """Who answers.

        Raises:
            ServerRefusedError: it is no server of this kind, or of a version that is not known.
        """

    async def stop(self, connection: Any, mode: UpdateMode) -> None:
        """Halt generation. On return no token is sampled until `resume`; requests stay in the server."""

    async def resume(self, connection: Any) -> None:
        """Go on after `stop`; requests that came meanwhile are served."""

    async def abort(self, connection: Any) -> None:
        """End all requests now; each is answered with the tokens that it has and `finish` abort."""

    async def load(self, connection: Any, folder: Path, label: str, mode: UpdateMode) -> None:
        """Take over the weights in `folder` while stopped; further tokens carry `label`.

        In `recompute` no key or value of older weights is used afterwards, in `keep_cache` those of live requests are.

        Raises:
            UpdateRefusedError: the server says that it did not.
        """

    def name_of(self, connection: Any) -> str:
        """The name under which requests ask for the weights of a server; empty for the model's own."""

    async def set_label(self, connection: Any, label: str) -> None:
        """Name the weights that the server holds."""

    async def join_group(self, connection: Any, group: WeightGroup, first_rank: int) -> None:
        """Become the ranks from `first_rank` on of a group; returns when the group stands."""

    async def receive(
        self,
        connection: Any,
        group: WeightGroup,
        tensors: Sequence[TensorDescription],
        label: str,
        mode: UpdateMode,
    ) -> None:
        """Take over tensors that rank 0 broadcasts, one by one in this order, while stopped. As `load` otherwise."""

    async def leave_group(self, connection: Any, group: WeightGroup) -> None:
        """Forget a group."""

    async def sleep(self, connection: Any) -> None:
        """Give the GPU's memory back while stopped and without requests: weights and cache."""

    async def wake_up(self, connection: Any) -> None:
        """Take the memory again; contents are undefined until weights are loaded."""
