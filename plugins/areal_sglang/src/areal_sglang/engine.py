"""The inference engine that a config chooses with `sglang`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from areal_core.errors import ConfigError
from areal_servers.fleet import ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.interfaces import ModelReference, Processes
    from areal_sglang.config import SGLangConfig


class SGLangEngine(ServerFleet):
    """A fleet of SGLang servers, also a `TensorReader`; see `ServerFleet` and `SGLangAdapter` for the arguments."""

    def __init__(
        self,
        settings: SGLangConfig,
        log_dir: Path,
        processes: Processes | None = None,
        gpus: Sequence[int] | None = None,
        scratch: Path | None = None,
    ) -> None:
        if settings.servers and not settings.program and find_spec("sglang") is None:
            raise ConfigError(
                "SGLang is not installed beside areal, and the run is to start SGLang servers",
                hints=["pip install 'areal-sglang[engine]'; or set program, where it is installed, or addresses"],
            )
        settings = settings.with_key(log_dir.parent, processes)
        # Servers on other nodes see the run's folder, and not this node's own.
        seen_by_all = log_dir if processes is not None and log_dir.is_dir() else scratch
        self._speaker = SGLangAdapter(settings, seen_by_all)
        super().__init__(settings, self._speaker, log_dir, processes, gpus)
        self._reading = Reading(self._speaker, self.roster, self._updater, settings.update_timeout_s)
        self.read_tensors, self.update_weights = self._reading.read, self._reading.update_weights

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        self._speaker.serve(model)
        await super().start(model)
