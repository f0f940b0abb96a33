"""What an adapter for one kind of inference server must do. The rest of this package is what all servers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from areal_core.errors import RunError
from areal_core.inference.errors import RequestRefusedError, UpdateRefusedError
from areal_core.inference.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import TokenIds
    from areal_core.data.trajectory import Values
    from areal_core.interfaces.inference import (
        InferenceCapabilities,
        SamplingParameters,
        SharedMemory,
        TensorDescription,
        UpdateMode,
    )
    from areal_core.interfaces.model import ModelReference


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command that starts a server process.

    Attributes:
        arguments: the command line, the program first.
        environment: variables in addition to the run's own.
        address: address at which the server then answers; empty for `http://host:port`.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server reports of itself.

    Attributes:
        version: version of the server program.
        model: name or path of the model that it serves, as the server has it.
        context: longest sequence that it takes, prompt and output together, in tokens.
        slots: number of requests that it works on concurrently.
        dtype: dtype of its parameters, as PyTorch names it. Empty if the server does not report it.
        ranks: number of processes that hold a share of the weights: tensor times data parallelism.
        reports_spans: whether an answer reports which of its tokens were sampled by which version. If not, a weight
            update ends the requests in progress, and they are continued afterwards.
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
    """One request to one server: a `GenerationRequest`, or what is left of it.

    Attributes:
        name: unique among all requests of the fleet. Servers write it into their logs.
        input_ids: prompt and all tokens so far. It can be put into a body for `ServerConnection` as it is.
        sampling: sampling settings, with the lengths that are left.
        seed: seed of this partial generation.
        cache_salt: a server may share a cached prefix only between partial generations with the same salt.
        images: image files in base64, as in `GenerationRequest`.
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
    """A run of tokens with one label, as SGLang and vLLM write it. `msgspec.structs.astuple` turns it into an item of
    `Chunk.spans`.

    Attributes:
        version: label of the weights that sampled the tokens.
        start, end: position of the first token, and of the first one after the run, in the tokens of the answer.

    Example:
        >>> import msgspec
        >>> from areal_core.servers import Span
        >>> spans = msgspec.json.decode(b'[{"version": "4f-3", "start": 0, "end": 2}]', type=list[Span])
        >>> [msgspec.structs.astuple(span) for span in spans]
        [('4f-3', 0, 2)]
    """

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a partial generation.

    Attributes:
        output_ids, logprobs: the new tokens and their log-probabilities: lists, or arrays of type q and f.
        finish: why the answer is complete; None if more chunks follow. `abort`: an update or a client ended it.
        spans: (label, start, end) over all tokens so far; None if the server reports none. If the partial generation
            is interrupted, the tokens under the latest spans are kept.
        columns: in the last chunk, further values of all tokens, those of the input included; see `Generation`.
        top_ids, top_logprobs: the likeliest tokens at the position of each new token and their log-probabilities, one
            position behind another; as many for each token as `SamplingParameters.top_logprobs`.
        prompt_logprobs: the next log-probabilities of the input's tokens after the first, if
            `SamplingParameters.prompt_logprobs` is set; see `Generation`. All come by the first new token.
    """

    output_ids: Iterable[int]
    logprobs: Iterable[float]
    finish: Literal["stop", "length", "abort"] | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    columns: Mapping[str, Values] = field(default_factory=dict)
    top_ids: Iterable[int] = ()
    top_logprobs: Iterable[float] = ()
    prompt_logprobs: Iterable[float] = ()


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group in which rank 0, the trainer, broadcasts weights to servers.

    Attributes:
        name: new for each group.
        address, port: where the trainer serves the store through which the members meet.
        world_size: number of members.
        backend: `nccl` or `gloo`.

    Example:
        >>> from areal_core.servers import WeightGroup
        >>> group = WeightGroup("areal-1f2e", "10.0.0.5", 29500, world_size=3, backend="nccl")
        >>> store = {"master_address": group.address, "master_port": group.port, "backend": group.backend}
        >>> first_rank = 1  # of the server; the trainer is rank 0
        >>> {"group_name": group.name, "rank_offset": first_rank, "world_size": group.world_size, **store}
        {'group_name': 'areal-1f2e', 'rank_offset': 1, 'world_size': 3,
         'master_address': '10.0.0.5', 'master_port': 29500, 'backend': 'nccl'}
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


class Connection(Protocol):
    """A connection to one server, of the adapter's own class.

    Attributes:
        address: the server's address.
    """

    address: str

    def close(self) -> None:
        """Cancel every call in progress. The next call connects again."""


class ServerAdapter(ABC):
    """The base of adapters: speaks the protocol of one kind of server. All state of a server is in its connection.

    A config names an adapter as its inference engine. The run puts it behind a `ServerFleet`, which has the servers and
    calls the adapter. A program that is no run constructs the fleet itself: `ServerFleet(MyAdapter(settings), folder)`.

    Rollout workers use `connect` and `generate`; a process that starts a server uses `command`; the rollout controller
    uses all others, too. A method that calls a server may raise `ServerLostError` and `RequestRefusedError`; see
    `areal_core.servers`. Adapters for servers that speak HTTP derive from `areal_core.servers.HTTPAdapter`.

    The methods with a default are for what only some servers can do. Leave them out if yours cannot.

    Args:
        settings: the fleet's settings, an instance of `Config`.

    Attributes:
        Config: model of the settings; `FleetSettings` for an `HTTPAdapter` that names no other.
        name: name of the server program, for log lines.
        package: Python package of the server program. A run that starts servers without the setting `program` is
            refused if the package is not installed beside areal. Empty if the program comes with the plugin.
        group_store_prefixes: prefixes of the keys under which this server meets others in a process group's store, by
            backend, outermost first. `{group}` stands for the group's name. Empty if the server cannot receive a
            broadcast.
        settings: the fleet's settings. In a run they have the run's key (`ServerSettings.key`).

    Example:
        >>> import asyncio
        >>> from pathlib import Path
        >>> from areal_core.data import TokenIds
        >>> from areal_core.servers import Chunk, Connection, InferenceCapabilities, PartialGeneration
        >>> from areal_core.servers import SamplingParameters, ServerAdapter, ServerIdentity, ServerSettings, UpdateMode
        >>> class Local(Connection):
        ...     def __init__(self, address):
        ...         self.address = address
        >>> class Repeating(ServerAdapter):  # for servers that repeat the last token of the prompt
        ...     name = "repeating"
        ...
        ...     def capabilities(self):
        ...         return InferenceCapabilities(frozenset({"recompute"}))
        ...
        ...     def connect(self, address):
        ...         return Local(address)
        ...
        ...     async def identify(self, connection):
        ...         return ServerIdentity("1.0", "/models/tiny", context=4096, slots=8)
        ...
        ...     async def generate(self, connection, partial: PartialGeneration):
        ...         count = partial.sampling.max_new_tokens
        ...         yield Chunk([partial.input_ids[-1]] * count, [0.0] * count, "length")
        ...
        ...     async def load(self, connection, folder, label, mode: UpdateMode):
        ...         print(f"{connection.address} loads {folder} as {label}")
        ...
        ...     async def nothing(self, connection, *arguments):
        ...         pass
        ...
        ...     check_health = stop = resume = abort = set_label = nothing
        >>> async def use(adapter):  # as a fleet does
        ...     connection = adapter.connect("host:1")
        ...     await adapter.load(connection, Path("/weights/3"), "4f-3", "recompute")
        ...     sampling = SamplingParameters(max_new_tokens=2)
        ...     partial = PartialGeneration("0.1", TokenIds.of([5, 7]), sampling, seed=0, cache_salt="3")
        ...     return [(chunk.output_ids, chunk.finish) async for chunk in adapter.generate(connection, partial)]
        >>> asyncio.run(use(Repeating(ServerSettings())))
        host:1 loads /weights/3 as 4f-3
        [([7, 7], 'length')]
    """

    Config: ClassVar[type[ServerSettings]] = ServerSettings
    name: str
    package: ClassVar[str] = ""
    group_store_prefixes: Mapping[str, Sequence[str]] = MappingProxyType({})
    settings: Any

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def capabilities(self) -> InferenceCapabilities:
        """Return what servers of this kind can do."""

    def command(self, model: ModelReference, host: str, port: int, scratch: Path) -> ServerCommand:
        """Return the command that starts a server on this machine. If `settings.key` is set, the server requires it.

        Args:
            model: the model that it serves.
            host, port: where it listens.
            scratch: a private folder that outlives the server, for example for a file with the key.

        Raises:
            RunError: a server cannot be started with these settings, or areal cannot start servers of this kind;
                the latter is the default.
        """
        raise RunError(
            f"areal cannot start {self.name} servers", hints=["set servers=0, and name running ones in addresses"]
        )

    @abstractmethod
    def connect(self, address: str) -> Connection:
        """Return a connection that opens with the first call, which is also where it fails.

        Args:
            address: the server's address.
        """

    def serve(self, model: ModelReference) -> None:  # noqa: B027 - a default
        """Prepare for requests to this model. Default: any model will do.

        Raises:
            RunError: servers of this kind, as they are set, cannot serve it.
        """

    @abstractmethod
    def generate(self, connection: Any, partial: PartialGeneration) -> AsyncIterator[Chunk]:
        """Request a partial generation and yield its tokens as they arrive. The last chunk has a `finish`."""

    @abstractmethod
    async def check_health(self, connection: Any, timeout_s: float) -> None:
        """Return if the server is alive.

        This is called during updates and while the server sleeps. It must neither generate nor delay an update.
        """

    @abstractmethod
    async def identify(self, connection: Any) -> ServerIdentity:
        """Return what the server reports of itself.

        Raises:
            ServerRefusedError: it is not a server of this kind, or its version is unknown.
        """

    @abstractmethod
    async def stop(self, connection: Any, mode: UpdateMode) -> None:
        """Pause generation. On return no token is sampled until `resume`. Requests stay in the server."""

    @abstractmethod
    async def resume(self, connection: Any) -> None:
        """Resume generation after `stop`, with the requests that arrived in between."""

    @abstractmethod
    async def abort(self, connection: Any) -> None:
        """End all requests now. Each is answered with the tokens that it has, and `finish` is abort."""

    @abstractmethod
    async def load(self, connection: Any, folder: Path, label: str, mode: UpdateMode) -> None:
        """Load the weights in `folder` while generation is paused. Further tokens carry `label`.

        In `recompute` no key or value of older weights is used afterwards; in `keep_cache` those of live requests are.

        Raises:
            UpdateRefusedError: the server reports that it did not load them.
        """

    @abstractmethod
    async def set_label(self, connection: Any, label: str) -> None:
        """Set the label of the weights that the server holds."""

    def name_of(self, connection: Any) -> str:
        """Return the name under which requests ask for a server's weights. Default: empty, the model's own name."""
        return ""

    async def join_group(self, connection: Any, group: WeightGroup, first_rank: int) -> None:
        """Join a process group with ranks from `first_rank` on. Returns when the group is complete.

        Raises:
            UpdateRefusedError: the server cannot receive broadcasts; this is the default.
        """
        raise UpdateRefusedError(f"{self.name} servers receive no broadcasts")

    async def receive(
        self,
        connection: Any,
        group: WeightGroup,
        tensors: Sequence[TensorDescription],
        label: str,
        mode: UpdateMode,
    ) -> None:
        """Load tensors that rank 0 broadcasts, in this order, while generation is paused. Otherwise as `load`.

        Raises:
            UpdateRefusedError: the server cannot receive broadcasts; this is the default.
        """
        raise UpdateRefusedError(f"{self.name} servers receive no broadcasts")

    async def leave_group(self, connection: Any, group: WeightGroup) -> None:  # noqa: B027 - a default
        """Leave a process group. Default: the server was in none."""

    async def begin_reading(self, connection: Any) -> None:  # noqa: B027 - a default
        """Prepare a server that has its memory and no requests to read weights. Default: it needs no preparation.

        The fleet calls this, then `read` for each part of the weights, then `end_reading`, if the transports in
        `capabilities` have `core/ipc`.

        Raises:
            UpdateRefusedError: the server reports that it cannot read.
        """

    async def read(
        self, connection: Any, tensors: Sequence[TensorDescription], copies: Sequence[Sequence[SharedMemory]]
    ) -> None:
        """Copy a part of the weights from the memory of the trainer's GPUs. On return every copy has been opened.

        Args:
            connection: the connection to a server on these GPUs.
            tensors: the tensors of the part.
            copies: for each of the server's GPUs, in the order of its ranks, where the tensors are, in their order.

        Raises:
            UpdateRefusedError: the server reports that it did not copy them, or it cannot; this is the default.
        """
        raise UpdateRefusedError(f"{self.name} servers read no weights in GPU memory")

    async def end_reading(self, connection: Any, label: str) -> None:
        """Take over what was read: further tokens carry `label`. Default: set the label.

        Raises:
            UpdateRefusedError: the server reports that it does not have all weights.
        """
        await self.set_label(connection, label)

    async def sleep(self, connection: Any) -> None:
        """Free the GPU memory of weights and cache, while generation is paused and no request is in progress.

        Raises:
            RequestRefusedError: the server cannot; this is the default.
        """
        raise RequestRefusedError(f"{self.name} servers cannot free their GPU memory")

    async def wake_up(self, connection: Any) -> None:  # noqa: B027 - a default
        """Allocate the memory again. Its contents are undefined until weights are loaded.

        Default: a server that never sleeps has nothing to do.
        """
