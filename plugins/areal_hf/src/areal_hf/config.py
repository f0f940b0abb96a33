"""Settings of the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field

from areal_core.config import Seconds, ServerBounds  # noqa: TC001 - pydantic reads annotations
from areal_core.processes import count_gpus, has_nvidia_driver
from areal_core.servers import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.engines import ModelReference
    from areal_core.launchers import ProcessGroup
    from areal_core.processes import Member

_SERVERS = ("sglang", "vllm")


class HFConfig(ServerSettings):
    """Settings of the embedded inference engine."""

    least_servers: ClassVar[int] = 1
    servers: int | ServerBounds = 1
    """Number of server processes, each with a copy of the model. {minimum, maximum}: an elastic fleet, whose processes
    start and end with their nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: the GPU, if PyTorch sees one."""
    max_concurrent_requests: int = Field(128, ge=1)
    """Maximum number of concurrent requests of one process. Further requests wait for a slot."""
    max_sequence_length: int | None = Field(None, ge=2)
    """Maximum length of a sequence, prompt and output together, in tokens. null: the model's own limit."""
    cache_gib: float = Field(2.0, gt=0)
    """Memory in GiB for the KV caches of running requests. Requests that do not fit wait."""
    prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens in one forward pass, including padding. A longer prompt gets a pass of its own."""
    update_mode: Literal["keep_cache", "recompute"] = "keep_cache"
    """KV cache of running requests at a weight sync: keep it, or recompute it with the new weights."""
    threads: int = Field(1, ge=1)
    """CPU threads of one process."""
    deterministic: bool = False
    """Run one request at a time, in order of arrival, so that answers are bit-identical."""
    start_timeout_s: Seconds = Field(300.0, gt=0)
    """Timeout in seconds for loading the model."""

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """See `ServerSettings.automatic_rank`."""
        del gpus
        return 1

    def process_groups(self, config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
        """See `ServerSettings.process_groups`."""
        return [replace(group, cores_each=self.threads) for group in super().process_groups(config, run_dir)]

    def serve(self, config: RunConfig, model: ModelReference, member: Member, run_dir: Path) -> int:
        """Run a server until the run ends; see `ServerSettings.serve`."""
        del config, run_dir
        member.enter_loading("loading the model", self.start_timeout_s)
        from areal_hf.server import main

        def announce(address: str) -> None:
            member.announce("server", address)
            member.enter("generating")

        address = f"tcp:{member.host}:0" if self.key else f"unix:{member.scratch}/server.sock"
        asyncio.run(main(self, model, address, announce))
        return 0

    def for_run(self, config: RunConfig) -> Self:
        """See `ServerSettings.for_run`. In a deterministic run, servers are deterministic."""
        return self.model_copy(update={"deterministic": self.deterministic or config.deterministic})

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that another engine would be faster, and that the memory plan does not count this engine."""
        if self.device != "cpu" and count_gpus() and has_nvidia_driver():
            servers = [name for name in _SERVERS if find_spec(name) and find_spec(f"areal_{name}")]
            faster = f"{' and '.join(servers)}, installed here," if servers else "SGLang and vLLM, not installed here,"
            yield f"{faster} generate faster on a GPU than this engine: set inference_engine.type=auto"
        if self.device != "cpu" and config.placement.gpu_memory_gib is not None and not config.placement.disaggregated:
            yield (
                "the memory plan does not count this engine's copy of the model on the trainer's GPU, and its KV cache "
                f"of up to cache_gib, {self.cache_gib:g} GiB"
            )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield contradictions with the rest of the config."""
        yield from super().check(config)
        if (self.deterministic or config.deterministic) and self.bounds.maximum > 1:
            yield "deterministic runs one request at a time: set servers to 1"
        if self.max_sequence_length is not None and config.longest_sequence > self.max_sequence_length:
            yield f"max_sequence_length is {self.max_sequence_length}, but sequences may have {config.longest_sequence}"
