"""The inference engine that a config chooses with `vllm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.servers import ServerFleet
from areal_vllm.adapter import VLLMAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.processes import Member
    from areal_vllm.config import VLLMConfig


class VLLMEngine(ServerFleet):
    """A fleet of vLLM servers; see `ServerFleet` for the arguments.

    Raises:
        ConfigError: the run is to start servers, and nothing says where vLLM is.
    """

    def __init__(
        self, settings: VLLMConfig, log_dir: Path, member: Member | None = None, gpus: Sequence[int] | None = None
    ) -> None:
        settings.check_program("vllm", "vLLM")
        settings = settings.with_key(log_dir.parent, member.host if member else "")
        self._speaker = VLLMAdapter(settings)
        super().__init__(settings, self._speaker, log_dir, member, gpus)
