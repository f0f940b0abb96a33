"""The inference engine that a config chooses with `vllm`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from areal_core.errors import ConfigError
from areal_servers.fleet import ServerFleet
from areal_vllm.adapter import VLLMAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.interfaces import ModelReference, Processes
    from areal_vllm.config import VLLMConfig


class VLLMEngine(ServerFleet):
    """A fleet of vLLM servers; see `ServerFleet` for the arguments.

    Raises:
        ConfigError: the run is to start servers, and nothing says where vLLM is.
    """

    def __init__(
        self, settings: VLLMConfig, log_dir: Path, processes: Processes | None = None, gpus: Sequence[int] | None = None
    ) -> None:
        if settings.servers and not settings.program and find_spec("vllm") is None:
            raise ConfigError(
                "vLLM is not installed beside areal, and the run is to start vLLM servers",
                hints=["pip install 'areal-vllm[engine]'; or set program, where it is installed, or addresses"],
            )
        settings = settings.with_key(log_dir.parent, processes)
        self._speaker = VLLMAdapter(settings)
        super().__init__(settings, self._speaker, log_dir, processes, gpus)

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        self._speaker.serve(model)
        await super().start(model)
