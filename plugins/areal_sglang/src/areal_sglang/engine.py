"""The inference engine that a config chooses with `sglang`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_servers.fleet import ServerFleet
from areal_sglang.adapter import SGLangAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.interfaces import Processes
    from areal_sglang.config import SGLangConfig


class SGLangEngine(ServerFleet):
    """A fleet of SGLang servers; see `ServerFleet` and `SGLangAdapter` for the arguments."""

    def __init__(
        self,
        settings: SGLangConfig,
        log_dir: Path,
        processes: Processes | None = None,
        gpus: Sequence[int] | None = None,
        scratch: Path | None = None,
    ) -> None:
        super().__init__(settings, SGLangAdapter(settings, scratch), log_dir, processes, gpus)
