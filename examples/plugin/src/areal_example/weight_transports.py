"""A weight transport: how new weights reach the servers. The engine must name it in its capabilities."""

from __future__ import annotations

import time

from areal_core.engines import Broadcast


class TimedBroadcast(Broadcast):
    """The broadcast of areal, with a line in the log for each version."""

    def send(self, version: int, trained: int) -> bool:
        """See `areal_core.engines.WeightTransport.send`."""
        start = time.monotonic()
        needs_folder = super().send(version, trained)
        print(f"broadcast version {version} in {time.monotonic() - start:.2f} s", flush=True)
        return needs_folder
