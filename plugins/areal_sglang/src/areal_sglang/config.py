"""The settings of a fleet of SGLang servers."""

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

_MOST_OF_THE_FREE = 0.9


class SGLangConfig(FleetSettings):
    """Settings of a fleet of SGLang servers."""

    adapter_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of LoRA adapters that the servers load, for `train_engine.adapter.sync: alone`. null: they load
    merged weights."""
    memory_saver: bool = False
    """Let servers on the trainer's GPUs free their memory while it trains."""

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
        """Whether servers may read weights in the memory of the trainer's GPUs: the run must know which are theirs, and
        SGLang takes that of one copy of the weights."""
        is_own = bool(self.servers) and not self.addresses and not self.is_elastic
        return is_own and self.data_parallel == 1 and self.adapter_rank is None

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what SGLang cannot do with the rest of the config."""
        yield from super().check(config)
        if self.adapter_rank is not None:
            adapter = getattr(config.train_engine.settings, "adapter", None)
            if getattr(adapter, "sync", None) != "alone":
                yield "adapter_rank is set, and no adapter is synced: set train_engine.adapter.sync=alone"
            if config.takes_turns:
                yield "servers that give their memory away lose an adapter's base: split placement, or sync: merged"
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

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """See `ServerSettings.automatic_rank`."""
        return 3 if gpus and find_spec("sglang") else 0

    def unplanned(self, model: StoredModel) -> str:
        """See `FleetSettings.unplanned`. The pool of states takes a part of what is free, not of max_total_tokens."""
        if has_recurrent_states(model.description):
            return "SGLang keeps states of the model's recurrent layers, in memory that the plan does not count"
        return ""

    def options_within(self, share: GPUShare) -> dict[str, OptionValue]:
        """See `FleetSettings.options_within`.

        SGLang takes the smaller of two sizes: max_total_tokens, and the part mem_fraction_static of the memory that was
        free when it started. The trainer may have taken its memory by then or not, so the second one must not bind.
        """
        return {"max_total_tokens": share.cache_tokens, "mem_fraction_static": _MOST_OF_THE_FREE}
