"""A server outside of a run: `python -m areal_hf SETTINGS MODEL ADDRESS`. The first two arguments are JSON.

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
    """End this process when standard input is closed: the parent holds the other end, and has ended then."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    start_thread(end_with_parent, "end with the parent")
    model = msgspec.json.decode(sys.argv[2], type=ModelReference)
    settings = HFConfig.model_validate_json(sys.argv[1])
    asyncio.run(main(settings, model, sys.argv[3], lambda _: None))
