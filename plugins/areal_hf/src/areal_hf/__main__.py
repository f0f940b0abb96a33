"""A server that belongs to no run: `python -m areal_hf SETTINGS MODEL ADDRESS`, the first two in JSON; see `alone`."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from areal_core.engines import ModelReference
from areal_core.processes import start_thread
from areal_hf.config import HFConfig
from areal_hf.server import main


def end_with_parent() -> None:
    """Whoever has started this holds the other end of standard input."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    start_thread(end_with_parent, "end with the parent")
    model = msgspec.json.decode(sys.argv[2], type=ModelReference)
    settings = HFConfig.model_validate_json(sys.argv[1])
    asyncio.run(main(settings, model, sys.argv[3], lambda address: print(address, flush=True)))  # noqa: T201
