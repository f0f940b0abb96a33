"""Settings of a fleet of vLLM servers."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from areal_core.servers import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.servers import GPUShare, OptionValue


MAX_LOGPROBS = 20
"""vLLM's default of its option max_logprobs."""


class VLLMConfig(FleetSettings):
    """Settings of a fleet of vLLM servers."""

    sleep_mode: bool = False
    """Let servers on the trainer's GPUs free their memory while the trainer works."""
    adapter_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of LoRA adapters that the servers load, for `train_engine.adapter.sync: alone`. With null, servers
    load merged weights."""

    memory_options: ClassVar = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
    sleep_setting: ClassVar = "sleep_mode"

    @property
    def gives_memory(self) -> bool:
        """See `ServerSettings.gives_memory`."""
        return self.sleep_mode

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield settings of the config that vLLM does not support."""
        yield from super().check(config)
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, but no adapter is synced: set train_engine.adapter.sync=alone"
            if config.takes_turns:
                yield "servers that free their memory lose an adapter's base: split placement, or set sync=merged"

    def for_run(self, config: RunConfig) -> Self:
        """See `ServerSettings.for_run`. Servers accept requests for as many likeliest tokens as the run needs.

        That is one more than sampling.top_logprobs (`areal_vllm.adapter`). -1, no limit, would switch off sampling from
        a vocabulary that is split over GPUs.
        """
        needed = config.sampling.top_logprobs + 1
        if needed <= MAX_LOGPROBS or {"max_logprobs", "max-logprobs"} & self.options.keys():
            return self
        return self.model_copy(update={"options": {**self.options, "max_logprobs": needed}})

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """See `ServerSettings.automatic_rank`."""
        return 2 if gpus and find_spec("vllm") else 0

    def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
        """See `FleetSettings.options_within`.

        vLLM refuses to start unless the fraction gpu_memory_utilization of the GPU is free, and unless one sequence of
        max_model_len tokens fits into the cache. By default that is the model's context.
        """
        fraction = (share.weight_bytes + share.cache_bytes) / share.gpu_bytes
        options: dict[str, OptionValue] = {
            "kv_cache_memory_bytes": share.cache_bytes,
            "gpu_memory_utilization": math.ceil(100 * fraction) / 100,
        }
        return options | ({"max_model_len": share.cache_tokens} if share.cache_tokens < share.context else {})
