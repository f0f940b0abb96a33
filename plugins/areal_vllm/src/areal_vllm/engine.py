"""The inference engine that a config chooses with `vllm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_servers.fleet import ServerFleet
from areal_vllm.adapter import VLLMAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.interfaces import Processes
    from areal_vllm.config import VLLMConfig


class VLLMEngine(ServerFleet):
    """A fleet of vLLM servers; see `ServerFleet` for the arguments."""

    def __init__(
        self, settings: VLLMConfig, log_dir: Path, processes: Processes | None = None, gpus: Sequence[int] | None = None
    ) -> None:
        super().__init__(settings, VLLMAdapter(settings), log_dir, processes, gpus)
