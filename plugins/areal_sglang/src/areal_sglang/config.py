"""The settings of a fleet of SGLang servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from areal_core.servers.settings import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.interfaces import ModelReference
    from areal_core.servers.interface import ServerCommand


class SGLangConfig(FleetSettings):
    """Settings of a fleet of SGLang servers."""

    adapter_rank: int | None = Field(None, ge=1, le=512)
    """the highest rank of adapters (LoRA) that servers take by themselves, for `train_engine.adapter.sync: alone`;
    null: they take merged weights"""
    memory_saver: bool = False
    """servers on the trainer's GPUs give it their memory while it trains"""

    @property
    def gives_memory(self) -> bool:
        """See `ServerSettings.gives_memory`."""
        return self.memory_saver

    @property
    def transports(self) -> frozenset[str]:
        """See `InferenceCapabilities.transports`."""
        return super().transports | ({"core/ipc"} if self.reads_tensors else set())

    @property
    def reads_tensors(self) -> bool:
        """Whether servers may read weights in the memory of the trainer's GPUs: the run must know which are theirs, and
        SGLang takes that of one copy of the weights."""
        is_own = bool(self.servers) and not self.addresses and not self.is_elastic
        return is_own and self.data_parallel == 1 and self.adapter_rank is None

    def check(self, config: RunConfig) -> Iterable[str]:
        """What SGLang cannot do beside the rest of the config."""
        yield from super().check(config)
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, and no adapter is synced: set train_engine.adapter.sync=alone"
            if config.takes_turns:
                yield "servers that give their memory away lose an adapter's base: split placement, or sync: merged"
        is_bounded = "max_total_tokens" in self.option_names or not self.servers
        if config.placement.servers_share_gpus and not is_bounded:
            yield "a GPU has several servers: set options.max_total_tokens, the size of each one's cache"
        if config.placement.colocated and not self.memory_saver and not is_bounded:
            yield (
                "placement gives the same GPUs to generation and training: set memory_saver to true (they take "
                "turns), or options.max_total_tokens (both keep their memory)"
            )
        if config.weight_sync.transport.target == "core/ipc" and not (
            config.has_rank_on_every_gpu and self.reads_tensors
        ):
            yield (
                "weight_sync.transport is ipc, which is for servers of the run that take turns with the trainer on the "
                "same GPUs, a rank and one server on each, with memory_saver, data_parallel 1 and whole weights: set "
                "it to memory"
            )
        if config.sampling.min_new_tokens and not self.detokenize:
            yield "SGLang honors sampling.min_new_tokens only with its tokenizer: set detokenize to true"
        if self.api_key and "config" in self.options:
            yield "the key reaches SGLang through its own `config`: write what that file says into `options`"

    def server_command(self, model: ModelReference, host: str, port: int, run_dir: Path) -> ServerCommand:
        """See `FleetSettings.server_command`."""
        from areal_sglang.adapter import SGLangAdapter

        self.check_program("sglang", "SGLang")
        return SGLangAdapter(self.with_key(run_dir, host), Path(os.environ["AREAL_SCRATCH"])).command(model, host, port)
