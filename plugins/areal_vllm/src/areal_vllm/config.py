"""The settings of a fleet of vLLM servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_core.servers.settings import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces import ModelReference
    from areal_core.servers.interface import ServerCommand


class VLLMConfig(FleetSettings):
    """Settings of a fleet of vLLM servers."""

    sleep_mode: bool = False
    """servers on the trainer's GPUs give it their memory while it trains"""
    adapter_rank: int | None = Field(None, ge=1, le=512)
    """the highest rank of adapters (LoRA) that servers take by themselves, for `train_engine.adapter.sync: alone`;
    null: they take merged weights"""

    @property
    def gives_memory(self) -> bool:
        """See `ServerSettings.gives_memory`."""
        return self.sleep_mode

    def check(self, config: RunConfig) -> Iterable[str]:
        """What vLLM cannot do beside the rest of the config."""
        yield from super().check(config)
        # vLLM sizes its cache by the free memory of the GPU, which changes while the trainer allocates.
        is_bounded = {"gpu_memory_utilization", "kv_cache_memory_bytes"} <= self.option_names or not self.servers
        if config.placement.colocated and not self.sleep_mode and not is_bounded:
            yield (
                "placement gives the same GPUs to generation and training: set sleep_mode to true (they take turns), "
                "or options.kv_cache_memory_bytes and options.gpu_memory_utilization (both keep their memory)"
            )
        if config.placement.servers_share_gpus and "gpu_memory_utilization" not in self.option_names:
            yield "a GPU has several servers, and each would take 0.92 of it: set options.gpu_memory_utilization"
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, and no adapter is synced: set train_engine.adapter.sync=alone"
            if config.placement.colocated:
                yield "servers that give their memory away lose an adapter's base: split placement, or sync: merged"

    def server_command(self, model: ModelReference, host: str, port: int, run_dir: Path) -> ServerCommand:
        """See `FleetSettings.server_command`."""
        from areal_vllm.adapter import VLLMAdapter

        self.check_program("vllm", "vLLM")
        return VLLMAdapter(self.with_key(run_dir, host)).command(model, host, port)
