"""The settings that all kinds of servers share; a plugin's settings are derived from them."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from areal_core.config import Seconds, Secret, ServerBounds, Settings
from areal_core.disk import write_durably
from areal_core.errors import RunError
from areal_core.inference.gpu_share import GIB, SEVERAL, share_of_gpu
from areal_core.interfaces.model import Estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from areal_core.config import RunConfig
    from areal_core.inference.gpu_share import GPUShare
    from areal_core.interfaces.launcher import ProcessGroup
    from areal_core.interfaces.model import StoredModel

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_OPTIONS = {"host", "port", "model", "model_path", "tp", "tp_size", "tensor_parallel_size", "data_parallel_size"}
"""Options that areal sets itself, because they follow from other parts of the config."""
_CORES_OF_A_SERVER = 4
_Plain = bool | int | float | str


def _advise_several(config: RunConfig) -> str:
    """Return the note for a run whose one server shares its GPU with the trainer, and which would gain from several."""
    (gpu,) = set(config.placement.generation or [0])
    placement = f"{{generation: {[gpu] * SEVERAL}, training: {config.placement.training or [gpu]}}}"
    return (
        f"{SEVERAL} servers on GPU {gpu} generate faster than one: a model of this size keeps a server's Python thread "
        f"busy before it keeps the GPU busy: placement={placement}"
    )


def _option(value: Any) -> Any:
    """Validate here: pydantic would report one error for each type of the union."""
    parts = [*value] if isinstance(value, list | tuple) else [value]
    if any(not isinstance(one, _Plain) or (isinstance(one, float) and not math.isfinite(one)) for one in parts):
        raise ValueError("must be text, a number, true, false, or a list of these; write JSON as text")
    return parts if isinstance(value, tuple) else value


OptionValue = Annotated[_Plain | list[int | float | str], BeforeValidator(_option)]
"""A value of a server option: a number, text, bool, or a list of numbers and texts."""


class ServerSettings(Settings):
    """Settings of inference servers of any kind.

    If a subclass defines `serve(config, model, member, run_dir)`, the processes that the run starts are servers
    themselves. Otherwise they start a program; see `ServerAdapter.command`. areal calls `serve` on the settings as the
    run uses them: those that `for_run` returns, with the run's key.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    servers: Annotated[int, Field(ge=0)] | ServerBounds = 1
    """Number of servers that the run starts. If it is not set: as many as placement has GPUs for. The run begins once
    one is ready. {minimum, maximum}: an elastic fleet, whose servers come and go with their nodes."""
    api_key: Secret | None = None
    """API key of the servers, as env:NAME."""
    update_mode: Literal["keep_cache", "recompute"] = "recompute"
    """What a weight sync does with the KV cache of running requests: keep it, or recompute it under the new weights."""
    routed_experts: bool = False
    """For MoE models: servers report the routed experts of each token, and training routes the token through the same
    experts."""
    max_concurrent_requests: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests of one server. Further requests wait for a slot. null: as many as the
    server runs at a time."""
    start_timeout_s: Seconds = Field(900.0, gt=0)
    """Timeout in seconds for a server to become healthy after its start."""
    update_timeout_s: Seconds = Field(300.0, gt=0)
    """Timeout in seconds for loading new weights. A server that exceeds it is considered lost."""
    group_timeout_s: Seconds = Field(120.0, gt=0)
    """Timeout in seconds for forming the broadcast group. Servers that miss it load the weights from a folder."""
    health_interval_s: Seconds = Field(2.0, gt=0)
    """Seconds between health checks."""
    health_timeout_s: Seconds = Field(15.0, gt=0)
    """Health-check timeout in seconds. A server is considered lost when two checks in a row fail, or when it refuses
    the connection."""
    drain_timeout_s: Seconds = Field(60.0, ge=0)
    """Seconds in which a leaving server may finish its requests. Before a weight sync, requests that cannot continue on
    another server (stop texts or penalties, on servers that do not label tokens) have the same time."""
    restarts: int = Field(3, ge=0)
    """Number of restarts of one server within five minutes. After one more failure it stays down."""
    least_servers: ClassVar[int] = 0
    _made_key: str = PrivateAttr("")

    @field_validator("servers", mode="before")
    @classmethod
    def _number_or_bounds(cls, servers: Any, info: ValidationInfo) -> int | ServerBounds:
        """Validate here: pydantic would report one error for each type of the union."""
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
        """Whether servers on the trainer's GPUs free their memory while it trains (`InferenceEngine.sleep`)."""
        return False

    @property
    def is_elastic(self) -> bool:
        """Whether the number of servers changes with the nodes of the run."""
        return isinstance(self.servers, ServerBounds)

    @property
    def bounds(self) -> ServerBounds:
        """Minimum of ready servers, and maximum of servers that the run starts."""
        return ServerBounds(minimum=1, maximum=self.servers) if isinstance(self.servers, int) else self.servers

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what the servers cannot do with the rest of the config."""
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
            from areal_core.models.experts import replay_problems

            yield from replay_problems(config)

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Yield why servers cannot report the routed experts of this model."""
        del config
        if self.routed_experts:
            from areal_core.models.experts import model_problems

            yield from model_problems(model)

    def for_run(self, config: RunConfig) -> Self:
        """Return the settings that servers of a run with this config have. Default: these settings."""
        del config
        return self

    @property
    def key(self) -> str:
        """API key of the servers; empty for none."""
        return self._made_key if self.api_key is None else self.api_key.get()

    def with_key(self, run_dir: Path, host: str = "") -> Self:
        """Return these settings with a key of the run, if none is set and other machines can reach its servers.

        areal calls this for every adapter.

        Args:
            run_dir: holds the key in a file that only the user can read; the first process that asks writes it.
            host: address where servers of the run listen; empty to use only a key that exists.

        Raises:
            OSError: the run folder cannot be written.
        """
        file = run_dir / "servers" / "key"
        is_open = bool(host and self.servers) and host not in LOOPBACK
        if is_open and self.api_key is None and not file.is_file():
            with TemporaryDirectory(prefix=".servers-", dir=run_dir) as made:  # mode 0700
                (key := Path(made, file.name)).touch(0o600)
                write_durably(key, secrets.token_urlsafe(32).encode())  # another machine may read it now
                try:
                    Path(made).rename(file.parent)
                except OSError:
                    if not file.is_file():  # no other process was faster
                        raise
        found = self.model_copy()
        found._made_key = file.read_text() if file.is_file() else ""
        return found

    def gpus_of_servers(self, generation: Sequence[int] | None) -> list[tuple[int, ...]]:
        """Return the GPUs of each server that the run starts; empty tuples if placement names none.

        Args:
            generation: numbers of the GPUs for servers, as in `placement`; None if it names none.

        Example:
            >>> from areal_core.servers import ServerSettings
            >>> class Paired(ServerSettings):
            ...     @property
            ...     def gpus_each(self):
            ...         return 2
            >>> Paired(servers=2).gpus_of_servers([4, 5, 6, 7])
            [(4, 5), (6, 7)]
        """
        most, each = self.bounds.maximum, self.gpus_each
        if generation is None:
            return [()] * most
        return [tuple(generation[each * n : each * (n + 1)]) for n in range(min(most, len(generation) // each))]

    def process_groups(self, config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
        """Return a process group for each server, so that each is restarted alone."""
        from areal_core.interfaces.launcher import OnExit
        from areal_core.runtime.roles import role_group

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
                on_exit=OnExit.RESTART,
                restarts=self.restarts,
                shares_gpus=placement.colocated,
            )
            for number, gpus in enumerate(self.gpus_of_servers(placement.generation))
        ]


class FleetSettings(ServerSettings):
    """Settings of inference servers that are separate programs with an HTTP interface, such as SGLang and vLLM."""

    addresses: list[str] = Field(default_factory=list)
    """Addresses of servers that run already, each `http://host:port`. All must serve the run's model."""
    tensor_parallel: int = Field(1, ge=1)
    """Tensor-parallel degree of one server, in GPUs."""
    data_parallel: int = Field(1, ge=1)
    """Data-parallel degree of one server: number of copies of the weights in it. Above 1 no broadcast is possible."""
    program: list[str] = Field(default_factory=list)
    """Command that starts the server if it lives in another environment, such as [/envs/sglang/bin/python, -m,
    sglang.launch_server]. areal appends its options."""
    options: dict[str, OptionValue] = Field(default_factory=dict)
    """Further options of the server by name, such as `mem_fraction_static: 0.8`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers."""
    allow_unknown_version: bool = False
    """Accept servers of a version that this plugin was not tested with."""
    detokenize: bool = False
    """Let the servers detokenize. Required for sampling.stop."""
    stream_interval: int = Field(32, ge=1)
    """Tokens per message of a streaming answer. If a server dies, each of its requests loses at most this many
    tokens."""
    silence_timeout_s: Seconds = Field(300.0, gt=0)
    """Seconds without a token after which a request is considered lost."""

    needs_gpu: ClassVar[bool] = True
    memory_options: ClassVar[frozenset[str]] = frozenset()
    """Options that limit a server's memory; a config that sets them all leaves nothing for areal to compute."""
    sleep_setting: ClassVar[str] = ""
    """Setting with which servers give their memory to the trainer; empty if they cannot."""

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
        """Whether a server in `addresses` is on another machine."""
        return any(urlsplit(address).hostname not in LOOPBACK for address in self.addresses)

    @property
    def gpus_each(self) -> int:
        """See `ServerSettings.gpus_each`."""
        return self.tensor_parallel * self.data_parallel

    @property
    def option_names(self) -> set[str]:
        """Names in `options`, with underscores in place of hyphens."""
        return {name.replace("-", "_") for name in self.options}

    @property
    def transports(self) -> frozenset[str]:
        """See `InferenceCapabilities.transports`.

        Adapters travel in files, and the copies of the weights in one server have no ranks of their own in a broadcast.
        """
        is_possible = self.data_parallel == 1 and getattr(self, "adapter_rank", None) is None
        return frozenset({"core/broadcast"} if is_possible else ())

    def shares_gpu(self, config: RunConfig) -> bool:
        """Return whether servers keep memory on a GPU that others use, and areal must limit it."""
        placement = config.placement
        is_shared = placement.servers_share_gpus or (placement.colocated and not self.gives_memory)
        return bool(self.servers) and is_shared and not self.memory_options <= self.option_names

    def gpu_share(self, config: RunConfig, trainer: Estimate, model: StoredModel) -> GPUShare | None:
        """Return a server's part of a GPU that it shares; None if the memory of the GPU is not known.

        Args:
            config: config of the run.
            trainer: the plan of the trainer's memory.
            model: the model that the servers hold.

        Raises:
            RunError: the memory of the trainer or of the cache is not known, or there is no room for weights and the
                longest sequence.
        """
        limits = " and ".join(f"options.{name}" for name in sorted(self.memory_options))
        remedies = [f"set inference_engine.{limits}", "split placement"]
        if self.sleep_setting and not config.placement.servers_share_gpus:
            remedies.insert(0, f"set inference_engine.{self.sleep_setting}=true, so that they take turns")
        if (config.placement.colocated or config.placement.training is None) and not trainer.peak_bytes:
            raise RunError(
                "servers keep their memory on the trainer's GPUs, and the plan does not know what the trainer needs",
                hints=remedies,
            )
        if problem := self.unplanned(model):
            raise RunError(problem, hints=remedies)
        if (total := config.placement.gpu_bytes()) is None:
            return None
        try:
            share = share_of_gpu(config, model, total, trainer, self.tensor_parallel)
        except RunError as error:
            raise RunError(error.message, hints=remedies) from None
        if share.cache_tokens < max(1, config.longest_sequence):
            raise RunError(
                f"a GPU of {total / GIB:.1f} GiB has no room for the trainer ({share.trainer_bytes / GIB:.1f} GiB), "
                f"{share.servers} server(s) with weights of {share.weight_bytes / GIB:.1f} GiB each, and keys and "
                f"values of a sequence of {config.longest_sequence:,} tokens",
                hints=remedies,
            )
        return share

    def unplanned(self, model: StoredModel) -> str:
        """Return what the servers keep of this model that the plan does not count; empty for nothing."""
        del model
        return ""

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Yield what the plan of memory leaves out."""
        if config.placement.colocated and not self.gives_memory and self.memory_options <= self.option_names:
            yield "servers keep their memory beside the trainer's, and the plan of memory does not count it"

    def plan_memory(self, config: RunConfig, trainer: Estimate, model: StoredModel) -> Estimate:
        """See `Settings.plan_memory`."""
        if not self.shares_gpu(config):
            return Estimate()
        try:
            share = self.gpu_share(config, trainer, model)
        except RunError as error:
            return Estimate(misfits=[f"{error.message}: {'; or '.join(error.hints)}"])
        if share is None:
            return Estimate([("servers", "each sizes its cache on its GPU by what the trainer leaves")])
        size = f"{(share.weight_bytes + share.cache_bytes) / GIB:.1f} GiB of {share.room_bytes / GIB:.1f} that are left"
        row = f"each takes {size} on its GPU: weights, and keys and values of {share.cache_tokens:,} tokens"
        rows = [("servers", row)]
        if share.gains_from_several and (os.cpu_count() or 1) >= SEVERAL * _CORES_OF_A_SERVER:
            rows.append(("note", _advise_several(config)))
        figures = share._asdict() | {"room_bytes": share.room_bytes, "cache_tokens": share.cache_tokens}
        return Estimate(rows, figures={"gpu_share": figures})

    def within(self, share: GPUShare) -> Self:
        """Return the settings of a server that stays within its part of a GPU; the user's own options win."""
        return self.model_copy(update={"options": {**self.options_within(share), **self.options}})

    def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
        """Return the options, `memory_options` among them, with which a server takes no more than its part.

        Example:
            >>> from areal_core.servers import FleetSettings, GPUShare, OptionValue, option_arguments
            >>> class MySettings(FleetSettings):
            ...     def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
            ...         return {"cache_tokens": share.cache_tokens}
            >>> sizes = {"gpu_bytes": 80 << 30, "trainer_bytes": 30 << 30, "weight_bytes": 2 << 30}
            >>> share = GPUShare(**sizes, servers=1, token_bytes=1 << 16, context=40_960, useful_tokens=200_000)
            >>> settings = MySettings(options={"log_level": "info"}).within(share)
            >>> option_arguments(settings.options)
            ['--cache-tokens', '200000', '--log-level', 'info']
        """
        raise NotImplementedError

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what server programs cannot do with the rest of the config."""
        yield from super().check(config)
        if config.sampling.stop and not self.detokenize:
            yield "sampling.stop is a text, and the servers see only tokens: set detokenize to true"
        if config.deterministic:
            yield "servers do not repeat the same bits; use the embedded engine (hf) with deterministic=true"
        if self.data_parallel > 1 and config.weight_sync.transport.target == "core/broadcast":
            yield (
                f"weight_sync.transport is broadcast, which needs data_parallel 1, not {self.data_parallel}: start "
                "more servers instead, or set the transport to memory"
            )
        if own := self.option_names & OWN_OPTIONS:
            yield f"options.{min(own)}: areal tells servers that itself; leave it out"


def option_arguments(options: Mapping[str, OptionValue]) -> list[str]:
    """Return options as command-line arguments: true is the bare name, false is left out, a list is several words.

    Example:
        >>> from areal_core.servers import option_arguments
        >>> option_arguments({"mem_fraction_static": 0.8, "enable_lora": True, "cuda_graph_bs": [1, 2], "debug": False})
        ['--mem-fraction-static', '0.8', '--enable-lora', '--cuda-graph-bs', '1', '2']
    """
    words: list[str] = []
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(word)
        elif value is not False:
            words += [word, *map(str, value if isinstance(value, list) else [value])]
    return words
