"""The process that generates: `python -m areal_hf [ADDRESS]`.

Without an address it is a process of a run, and asks the run's driver for that of the engine.
"""

from __future__ import annotations

import asyncio
import sys

from areal_core.runs import Member, run_role

START_S = 3600.0


def play(member: Member) -> int:
    """Serve the engine of the run until it is gone."""
    member.on_stop = lambda: None  # it ends with the controller
    from areal_hf.engine import ENGINE
    from areal_hf.server import main

    address = member.ask(ENGINE, START_S)
    member.enter("generating")
    asyncio.run(main(address))
    return 0


def alone(address: str) -> None:
    """Serve an engine that belongs to no run."""
    from areal_hf.server import main

    asyncio.run(main(address))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        alone(sys.argv[1])
    else:
        sys.exit(run_role(play))
