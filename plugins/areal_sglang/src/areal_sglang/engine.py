"""The inference engine that a config chooses with `sglang`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.servers import ServerFleet
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.engines import SharedTensor, WeightUpdate
    from areal_core.processes import Member
    from areal_sglang.config import SGLangConfig


class SGLangEngine(ServerFleet):
    """A fleet of SGLang servers; see `ServerFleet` and `SGLangAdapter` for the arguments."""

    def __init__(
        self,
        settings: SGLangConfig,
        log_dir: Path,
        member: Member | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        settings.check_program("sglang", "SGLang")
        settings = settings.with_key(log_dir.parent, member.host if member else "")
        self._speaker = SGLangAdapter(settings)
        super().__init__(settings, self._speaker, log_dir, member, gpus)
        self._reading = Reading(self._speaker, self)

    async def read_tensors(self, version: int, tensors: Sequence[SharedTensor]) -> list[int]:
        """See `InferenceEngine.read_tensors`."""
        return await self._reading.read(version, tensors)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`: servers that have read the tensors need the version's name alone."""
        await self._reading.update_weights(update)
