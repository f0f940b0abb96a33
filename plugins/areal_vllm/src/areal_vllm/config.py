"""The settings of a fleet of vLLM servers."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from areal_core.servers import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.servers import GPUShare, OptionValue


class VLLMConfig(FleetSettings):
    """Settings of a fleet of vLLM servers."""

    sleep_mode: bool = False
    """Let servers on the trainer's GPUs free their memory while it trains."""
    adapter_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of LoRA adapters that the servers load, for `train_engine.adapter.sync: alone`. null: they load
    merged weights."""

    memory_options: ClassVar = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
    sleep_setting: ClassVar = "sleep_mode"

    @property
    def gives_memory(self) -> bool:
        """See `ServerSettings.gives_memory`."""
        return self.sleep_mode

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what vLLM cannot do with the rest of the config."""
        yield from super().check(config)
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, and no adapter is synced: set train_engine.adapter.sync=alone"
            if config.takes_turns:
                yield "servers that give their memory away lose an adapter's base: split placement, or sync: merged"

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """See `ServerSettings.automatic_rank`."""
        return 2 if gpus and find_spec("vllm") else 0

    def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
        """See `FleetSettings.options_within`.

        vLLM refuses to start unless the part gpu_memory_utilization of the GPU is free, and unless the cache has room
        for one sequence of max_model_len tokens, which is the model's context.
        """
        taken = (share.weight_bytes + share.cache_bytes) / share.gpu_bytes
        options: dict[str, OptionValue] = {
            "kv_cache_memory_bytes": share.cache_bytes,
            "gpu_memory_utilization": math.ceil(100 * taken) / 100,
        }
        return options | ({"max_model_len": share.cache_tokens} if share.cache_tokens < share.context else {})
