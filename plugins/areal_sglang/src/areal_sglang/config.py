"""Settings of a fleet of SGLang servers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from areal_core.models import has_recurrent_states
from areal_core.servers import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel
    from areal_core.servers import GPUShare, OptionValue

_MEMORY_FRACTION = 0.9


class SGLangConfig(FleetSettings):
    """Settings of a fleet of SGLang servers."""

    adapter_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of LoRA adapters that the servers load, for `train_engine.adapter.sync: alone`. With null, servers
    load merged weights."""
    memory_saver: bool = False
    """Let servers on the trainer's GPUs free their memory while the trainer works."""

    memory_options: ClassVar = frozenset({"max_total_tokens"})
    sleep_setting: ClassVar = "memory_saver"

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
        """Whether servers can read weights in the memory of the trainer's GPUs.

        The run must know the servers' GPUs, and SGLang reads only one copy of the weights.
        """
        is_own = bool(self.servers) and not self.addresses and not self.is_elastic
        return is_own and self.data_parallel == 1 and self.adapter_rank is None

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield settings of the config that SGLang does not support."""
        yield from super().check(config)
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, but no adapter is synced: set train_engine.adapter.sync=alone"
            if config.takes_turns:
                yield "servers that free their memory lose an adapter's base: split placement, or set sync=merged"
        if config.weight_sync.transport.target == "core/ipc" and not (
            config.has_rank_on_every_gpu and self.reads_tensors
        ):
            yield (
                "weight_sync.transport is ipc, which needs servers of the run that are colocated with the trainer: one "
                "rank and one server on each GPU, memory_saver, data_parallel 1 and no adapter_rank; otherwise set it "
                "to memory"
            )
        if config.sampling.min_new_tokens and not self.detokenize:
            yield "SGLang supports sampling.min_new_tokens only with its tokenizer: set detokenize to true"
        if self.api_key and "config" in self.options:
            yield "areal passes the key in SGLang's `config`: move the content of yours to `options`"

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """See `ServerSettings.automatic_rank`."""
        return 3 if gpus and find_spec("sglang") else 0

    def unplanned(self, model: StoredModel) -> str:
        """See `FleetSettings.unplanned`. SGLang takes recurrent states from free memory, not from max_total_tokens."""
        if has_recurrent_states(model.description):
            return "SGLang keeps states of the model's recurrent layers in memory that the plan does not count"
        return ""

    def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
        """See `FleetSettings.options_within`.

        SGLang uses the smaller of two limits: max_total_tokens, and the fraction mem_fraction_static of the memory that
        is free at its start. The trainer may have allocated its memory by then or not, so the second must not bind.
        """
        return {"max_total_tokens": share.cache_tokens, "mem_fraction_static": _MEMORY_FRACTION}
