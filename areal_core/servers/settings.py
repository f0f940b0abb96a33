"""The settings that all kinds of servers share; a plugin's settings are derived from them."""

from __future__ import annotations

import math
import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from areal_core.config import Seconds, Secret, ServerBounds, Settings
from areal_core.disk import write_durably
from areal_core.errors import ConfigError
from areal_core.plugins.catalog import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from areal_core.config import RunConfig
    from areal_core.interfaces import ModelReference, StoredModel
    from areal_core.interfaces.launcher import ProcessGroup
    from areal_core.servers.interface import ServerCommand

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_OPTIONS = {"host", "port", "model", "model_path", "tp", "tp_size", "tensor_parallel_size", "data_parallel_size"}
"""Of servers, which follow from the config elsewhere."""
_Plain = bool | int | float | str


def _option(value: Any) -> Any:
    """Judge it here: of a union every part would be told."""
    parts = [*value] if isinstance(value, list | tuple) else [value]
    if any(not isinstance(one, _Plain) or (isinstance(one, float) and not math.isfinite(one)) for one in parts):
        raise ValueError("must be text, a number, true, false, or a list of these; write JSON as text")
    return parts if isinstance(value, tuple) else value


OptionValue = Annotated[_Plain | list[int | float | str], BeforeValidator(_option)]


class ServerSettings(Settings):
    """Settings of servers of any kind, those of a protocol of their own included.

    Where `serve(config, model, member, run_dir)` is defined beside them, the processes that the run starts are servers
    themselves; see `areal_core.runs.server`.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    servers: Annotated[int, Field(ge=0)] | ServerBounds = 1
    """servers that the run starts, of which one must be ready before it begins: unless written, as many as placement
    names GPUs for; or bounds, between which they come and go with their nodes"""
    api_key: Secret | None = None
    """key that the servers ask for, as env:NAME"""
    update_mode: Literal["keep_cache", "recompute"] = "recompute"
    """on new weights the keys and values of live requests are kept, or rebuilt under them"""
    routed_experts: bool = False
    """of an MoE, servers tell which experts each token went through, and it is trained through the same ones"""
    max_concurrent_requests: int | None = Field(None, ge=1)
    """requests that one server is given at once; by default as many as it works on"""
    start_timeout_s: Seconds = Field(900.0, gt=0)
    """seconds until a server must be healthy"""
    update_timeout_s: Seconds = Field(300.0, gt=0)
    """seconds that taking over new weights may take"""
    group_timeout_s: Seconds = Field(120.0, gt=0)
    """seconds in which servers must meet for broadcasts; who does not gets the weights through a folder"""
    health_interval_s: Seconds = Field(2.0, gt=0)
    """seconds between looks at a server's health"""
    health_timeout_s: Seconds = Field(15.0, gt=0)
    """seconds that such a look may take; twice means lost"""
    drain_timeout_s: Seconds = Field(60.0, ge=0)
    """seconds that a leaving server may finish its requests, and any server before an update those that cannot go on
    elsewhere (with stop texts or penalties, on servers that do not label tokens)"""
    restarts: int = Field(3, ge=0)
    """times within five minutes that a server of the run is started again"""
    least_servers: ClassVar[int] = 0
    _made_key: str = PrivateAttr("")

    @field_validator("servers", mode="before")
    @classmethod
    def _number_or_bounds(cls, servers: Any, info: ValidationInfo) -> int | ServerBounds:
        """Judge them here: of a union every part would be told."""
        if isinstance(servers, dict):
            return ServerBounds.model_validate(servers, context=info.context)
        if isinstance(servers, ServerBounds) or (type(servers) is int and servers >= cls.least_servers):
            return servers
        raise ValueError(f"must be a number from {cls.least_servers}, or bounds: {{minimum: 2, maximum: 16}}")

    @property
    def elsewhere(self) -> Sequence[str]:
        """Addresses of servers that run already."""
        return ()

    @property
    def gpus_each(self) -> int:
        """GPUs of one server."""
        return 1

    @property
    def transports(self) -> frozenset[str]:
        """See `InferenceCapabilities.transports`."""
        return frozenset()

    @property
    def gives_memory(self) -> bool:
        """Whether servers on the trainer's GPUs give it their memory while it trains (`MemorySharer`)."""
        return False

    @property
    def is_elastic(self) -> bool:
        """Whether servers come and go with their nodes."""
        return isinstance(self.servers, ServerBounds)

    @property
    def bounds(self) -> ServerBounds:
        """How many servers must be ready, and how many the run starts."""
        return ServerBounds(minimum=1, maximum=self.servers) if isinstance(self.servers, int) else self.servers

    def check(self, config: RunConfig) -> Iterable[str]:
        """What servers cannot do beside the rest of the config."""
        if self.bounds.minimum > self.bounds.maximum + len(self.elsewhere):
            named = f"servers.maximum is {self.bounds.maximum}, with {len(self.elsewhere)} in addresses"
            yield f"servers.minimum is {self.bounds.minimum}, and {named}: there would never be enough"
        gpus, most = config.placement.generation, self.bounds.maximum
        least = self.bounds.minimum - len(self.elsewhere) if self.is_elastic else most
        if gpus is not None and most and not least * self.gpus_each <= len(gpus) <= most * self.gpus_each:
            servers = f"{self.servers} servers with {self.gpus_each} GPU(s) each"
            yield f"{servers} do not fit placement.generation, which names {len(gpus)}: set servers, or name other GPUs"
        if shared := [own for own in self.gpus_of_servers(gpus) if len(set(own)) < len(own)]:
            yield f"placement.generation gives one server GPUs {list(shared[0])}: name each of them once"
        if config.placement.colocated and self.is_elastic:
            yield "servers that come and go need GPUs of their own: write servers as a number, or split placement"
        if self.routed_experts:
            from areal_core.servers.experts import replay_problems

            yield from replay_problems(config)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """What the plan of memory leaves out."""
        if config.placement.colocated and not self.gives_memory:
            yield "servers keep their memory beside the trainer's, and the plan of memory does not count it"

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Of a model without experts, or whose choices are not known, nothing can be told."""
        del config
        if self.routed_experts:
            from areal_core.servers.experts import model_problems

            yield from model_problems(model)

    @property
    def key(self) -> str:
        """What the servers ask for; empty for nothing."""
        return self._made_key if self.api_key is None else self.api_key.get()

    def with_key(self, run_dir: Path, host: str = "") -> Self:
        """The same, with the run's own key where none is named and others can reach its servers.

        Args:
            run_dir: holds the key, for the user alone; whichever process of the run comes first makes it.
            host: where servers of the run listen; empty to use a key that is there.

        Raises:
            OSError: the run folder cannot be written.
        """
        file = run_dir / "servers" / "key"
        is_open = bool(host and self.servers) and host not in LOOPBACK
        if is_open and self.api_key is None and not file.is_file():
            with TemporaryDirectory(prefix=".servers-", dir=run_dir) as made:  # of the user alone
                (key := Path(made, file.name)).touch(0o600)
                write_durably(key, secrets.token_urlsafe(32).encode())  # another machine may read it at once
                try:
                    Path(made).rename(file.parent)
                except OSError:
                    if not file.is_file():  # nobody else was quicker
                        raise
        found = self.model_copy()
        found._made_key = file.read_text() if file.is_file() else ""
        return found

    def gpus_of_servers(self, generation: Sequence[int] | None) -> list[tuple[int, ...]]:
        """For each server that the run starts, its share of the GPUs that generate; empty where none are named."""
        most, each = self.bounds.maximum, self.gpus_each
        if generation is None:
            return [()] * most
        return [tuple(generation[each * n : each * (n + 1)]) for n in range(min(most, len(generation) // each))]

    def process_groups(self, config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
        """The servers that the run starts, each by itself."""
        from areal_core.driver import role_group
        from areal_core.interfaces.launcher import EndMeans

        placement = config.placement
        has_gpus = placement.generation is not None or (self.is_elastic and placement.training is not None)
        return [
            role_group(
                f"server-{number}",
                "server",
                run_dir,
                gpus_each=self.gpus_each if has_gpus else 0,
                gpus=None if placement.is_counted else gpus or None,
                cores_each=0,
                end=EndMeans.REPLACED,
                restarts=self.restarts,
                shares_gpus=placement.colocated,
            )
            for number, gpus in enumerate(self.gpus_of_servers(placement.generation))
        ]


class FleetSettings(ServerSettings):
    """Settings of a fleet of inference servers that are programs of their own and speak HTTP."""

    addresses: list[str] = Field(default_factory=list)
    """servers that run already, each `http://host:port`; all hold the same model"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share the weights of one server"""
    data_parallel: int = Field(1, ge=1)
    """copies of the weights within one server"""
    program: list[str] = Field(default_factory=list)
    """words that start the server, where it is not installed beside areal; options are appended"""
    options: dict[str, OptionValue] = Field(default_factory=dict)
    """further options of the server by name, such as `mem_fraction_static: 0.8`"""
    environment: dict[str, str] = Field(default_factory=dict)
    """environment variables of the servers"""
    allow_unknown_version: bool = False
    """use servers of a version that this plugin was not tested with"""
    detokenize: bool = False
    """servers follow the text beside the tokens: needed for sampling.stop"""
    stream_interval: int = Field(32, ge=1)
    """tokens that a server sends at a time: so many are lost at most when it dies"""
    silence_timeout_s: Seconds = Field(300.0, gt=0)
    """seconds without a token that end a request to a server"""

    @field_validator("addresses")
    @classmethod
    def _plain(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if not address.startswith(("http://", "https://")) or address.count("/") > 2:
                raise ValueError(f"'{address}' is not a server's address; write it as http://host:port")
        if len(set(addresses)) < len(addresses):
            raise ValueError("the same address occurs twice")
        return addresses

    @field_validator("program")
    @classmethod
    def _at_home(cls, program: list[str]) -> list[str]:
        return [os.path.expanduser(word) for word in program]  # noqa: PTH111 - most words are no paths

    @model_validator(mode="after")
    def _enough(self) -> FleetSettings:
        if not self.servers and not self.addresses:
            raise ValueError("there is no server: set servers to 1 or more, or give addresses of running ones")
        return self

    @property
    def elsewhere(self) -> Sequence[str]:
        """See `ServerSettings.elsewhere`."""
        return self.addresses

    @property
    def has_distant(self) -> bool:
        """Whether a server that runs already is, by its address, on another machine."""
        return any(urlsplit(address).hostname not in LOOPBACK for address in self.addresses)

    @property
    def gpus_each(self) -> int:
        """See `ServerSettings.gpus_each`."""
        return self.tensor_parallel * self.data_parallel

    @property
    def option_names(self) -> set[str]:
        """The names in `options`, which may be written with hyphens."""
        return {name.replace("-", "_") for name in self.options}

    @property
    def transports(self) -> frozenset[str]:
        """See `InferenceCapabilities.transports`; adapters of their own travel in files."""
        return frozenset({"core/broadcast"} if getattr(self, "adapter_rank", None) is None else ())

    def check(self, config: RunConfig) -> Iterable[str]:
        """What programs of servers cannot do beside the rest of the config."""
        yield from super().check(config)
        if config.sampling.stop and not self.detokenize:
            yield "sampling.stop is a text, and the servers see only tokens: set detokenize to true"
        if config.deterministic:
            yield "servers do not repeat the same bits; use the embedded engine (hf) with deterministic=true"
        if own := self.option_names & OWN_OPTIONS:
            yield f"options.{min(own)}: areal tells servers that itself; leave it out"

    def server_command(self, model: ModelReference, host: str, port: int, run_dir: Path) -> ServerCommand:
        """How a server of `model` is started on this machine, listening on `host`; with the run's key, if it has one.

        Whoever asks has a private folder, `AREAL_SCRATCH`, that outlives the server.
        """
        raise NotImplementedError

    def check_program(self, package: str, name: str) -> None:
        """That the program is there, where servers are to be started with the one beside areal.

        Raises:
            ConfigError: it is not.
        """
        if self.servers and not self.program and find_spec(package) is None:
            raise ConfigError(
                f"{name} is not installed beside areal, and the run is to start {name} servers",
                hints=[f"{install_command(package, extra='engine')}; or set program, or addresses and servers=0"],
            )


def option_arguments(options: Mapping[str, OptionValue]) -> list[str]:
    """Options as a command line has them: `true` is the bare word, `false` leaves it out, a list is several words."""
    words: list[str] = []
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(word)
        elif value is not False:
            words += [word, *map(str, value if isinstance(value, list) else [value])]
    return words
