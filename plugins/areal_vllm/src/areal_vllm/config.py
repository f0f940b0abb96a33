"""The settings of a fleet of vLLM servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_servers.settings import FleetSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class VLLMConfig(FleetSettings):
    """Settings of a fleet of vLLM servers."""

    sleep_mode: bool = False
    """servers can give their GPU memory back: needed where they share GPUs with the trainer"""

    def check(self, config: RunConfig) -> Iterable[str]:
        """What vLLM cannot do beside the rest of the config."""
        yield from super().check(config)
        if config.placement.in_turns and not self.sleep_mode:
            yield "placement gives the same GPUs to generation and training: set sleep_mode to true"
