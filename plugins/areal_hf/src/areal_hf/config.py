"""The settings of the embedded engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_core.config import Seconds, Settings


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
    start_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds that loading the model may take.")
    update_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds that taking over new weights may take.")
