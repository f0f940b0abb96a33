"""The inference engine that a config chooses with `hf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.servers import ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.alone import Alone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.engines import ModelReference
    from areal_core.processes import Member
    from areal_hf.config import HFConfig


class HFEngine(ServerFleet):
    """A fleet of servers of this plugin; see `ServerFleet` for the other arguments.

    Args:
        member: this process in the run, whose driver starts the servers. Without it, the engine starts them itself.
        deterministic: whether to serve one request at a time, as the setting of this name does.
    """

    def __init__(
        self,
        settings: HFConfig,
        log_dir: Path,
        member: Member | None = None,
        gpus: Sequence[int] | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        settings = settings.made_deterministic(deterministic)
        if member is not None:
            settings = settings.with_key(log_dir.parent, member.host)
        self._alone = None if member else Alone(settings, log_dir)
        super().__init__(settings, HFAdapter(settings), log_dir, member or self._alone, gpus)

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        if self._alone is not None:
            self._alone.model = model
        await super().start(model)

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        await super().close()
        if self._alone is not None:
            await self._alone.close()
