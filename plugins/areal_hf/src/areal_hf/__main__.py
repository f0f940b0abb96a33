"""A server outside of a run: `python -m areal_hf SETTINGS MODEL ADDRESS`, the first two in JSON.

See `HFAdapter.command`.
"""

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
    """End when standard input does: the program that has started this process holds the other end."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    start_thread(end_with_parent, "end with the parent")
    model = msgspec.json.decode(sys.argv[2], type=ModelReference)
    settings = HFConfig.model_validate_json(sys.argv[1])
    asyncio.run(main(settings, model, sys.argv[3], lambda _: None))
