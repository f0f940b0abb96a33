"""The settings of the embedded engine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from areal_core.config import Seconds, ServerBounds  # noqa: TC001 - pydantic reads annotations
from areal_core.launchers.guard import SCRATCH_VARIABLE
from areal_core.launchers.member import LOADING_SILENCE_S
from areal_core.servers.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces import ModelReference, ProcessGroup
    from areal_core.runs import Member


class HFConfig(ServerSettings):
    """Settings of the embedded inference engine."""

    least_servers: ClassVar[int] = 1
    servers: int | ServerBounds = 1
    """processes that generate, each with a copy of the model; or bounds, between which they come and go with their
    nodes"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model computes; auto takes the GPU where PyTorch sees one"""
    max_concurrent_requests: int = Field(128, ge=1)
    """requests that one process generates from at once; further ones wait in order of arrival"""
    max_sequence_length: int | None = Field(None, ge=2)
    """longest prompt and output together, in tokens; by default the model's own limit"""
    cache_gib: float = Field(2.0, gt=0)
    """keys and values never take more memory than this; requests wait instead"""
    prefill_tokens: int = Field(4096, ge=1)
    """prompt tokens, padding included, that one forward pass takes, unless one is longer"""
    update_mode: Literal["keep_cache", "recompute"] = "keep_cache"
    """on new weights the keys and values of live requests are kept, or recomputed under them"""
    threads: int = Field(1, ge=1)
    """CPU threads of a generating process"""
    deterministic: bool = False
    """one request at a time, in order of arrival: bit for bit the same whatever else is asked"""
    start_timeout_s: Seconds = Field(300.0, gt=0)
    """seconds that loading the model may take"""

    def process_groups(self, config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
        """See `ServerSettings.process_groups`."""
        return [replace(group, cores_each=self.threads) for group in super().process_groups(config, run_dir)]

    def serve(self, config: RunConfig, model: ModelReference, member: Member, run_dir: Path) -> int:
        """Be a server of the run; see `areal_core.runs.server`."""
        member.enter("loading the model", self.start_timeout_s, LOADING_SILENCE_S)
        from areal_hf.server import main

        def announce(address: str) -> None:
            member.announce("server", address)
            member.enter("generating")

        settings = self.with_key(run_dir, member.host).made_deterministic(config.deterministic)
        place = f"tcp:{member.host}:0" if settings.key else f"unix:{os.environ[SCRATCH_VARIABLE]}/server.sock"
        asyncio.run(main(settings, model, place, announce))
        return 0

    def made_deterministic(self, is_asked: bool) -> HFConfig:
        """The same, with one request at a time where the config asks for it."""
        return self.model_copy(update={"deterministic": self.deterministic or is_asked})

    def notes(self, config: RunConfig) -> Iterable[str]:
        """What a plan for GPUs leaves out."""
        if self.device != "cpu" and config.placement.gpu_memory_gib is not None and not config.placement.disaggregated:
            yield (
                f"on the trainer's GPU it has a copy of the model, and keys and values of up to cache_gib, "
                f"{self.cache_gib:g} GiB, which the plan of memory does not count"
            )

    def check(self, config: RunConfig) -> Iterable[str]:
        """One at a time is one server."""
        yield from super().check(config)
        if (self.deterministic or config.deterministic) and self.bounds.maximum > 1:
            yield "deterministic is one request at a time: set servers to 1"
        if self.max_sequence_length is not None and config.longest_sequence > self.max_sequence_length:
            yield f"max_sequence_length is {self.max_sequence_length}, and sequences may have {config.longest_sequence}"
