"""The settings of the embedded engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_core.config import Seconds, Settings
from areal_core.interfaces import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces import StoredModel


class HFConfig(Settings):
    """Settings of the embedded inference engine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model computes; auto takes the GPU where PyTorch sees one."
    )
    max_concurrent_requests: int = Field(
        128, ge=1, description="Requests that are generated from at once; further ones wait in order of arrival."
    )
    max_sequence_length: int | None = Field(
        None, ge=2, description="Longest prompt and output together, in tokens; by default the model's own limit."
    )
    cache_gib: float = Field(
        2.0, gt=0, description="Keys and values never take more memory than this; requests wait instead."
    )
    prefill_tokens: int = Field(
        4096, ge=1, description="Prompt tokens, padding included, that one forward pass takes, unless one is longer."
    )
    update_mode: Literal["keep_cache", "recompute"] = Field(
        "keep_cache",
        description="On new weights the keys and values of live requests are kept, or recomputed under them.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the generating process.")
    deterministic: bool = Field(
        False, description="One request at a time, in order of arrival: bit for bit the same whatever else is asked."
    )
    routed_experts: bool = Field(
        False,
        description="Of a mixture, tell which experts each token went through, and train it through the same ones "
        "(routing replay).",
    )
    start_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds that loading the model may take.")
    update_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds that taking over new weights may take.")

    def process_groups(self, config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
        """The process that generates."""
        del config, run_dir
        return [ProcessGroup("hf", "engine", [sys.executable, "-m", "areal_hf"], cores_each=self.threads)]

    def notes(self, config: RunConfig) -> Iterable[str]:
        """What a plan for GPUs leaves out."""
        if self.device != "cpu" and config.placement.gpu_memory_gib is not None:
            yield (
                f"on the trainer's GPU it has a copy of the model, and keys and values of up to cache_gib, "
                f"{self.cache_gib:g} GiB, which the plan of memory does not count"
            )

    def check(self, config: RunConfig) -> Iterable[str]:
        """What this engine tells, and the training engine does not hear."""
        if self.routed_experts:
            from areal_core.servers.experts import replay_problems

            yield from replay_problems(config)

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Of a model without experts, or whose choices are not known, nothing can be told."""
        del config
        if self.routed_experts:
            from areal_core.servers.experts import model_problems

            yield from model_problems(model)
