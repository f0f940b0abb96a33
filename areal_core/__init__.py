"""areal: asynchronous reinforcement learning for language models, a small core and plugins.

Nothing is imported here, so that `areal --help` and every plugin's record module stay cheap: `train`, `open_run`, `Run`
and `Table` are imported from `areal_core.library` when they are first used. Start reading at
`areal_core.plugins` (how the parts are found), `areal_core.config` (how a run is described) and `areal_core.runs`
(how the parts are put together).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what programs use from Python. Type checkers read its types in `__init__.pyi`."""
    if name in ("Run", "Table", "open_run", "train"):
        return getattr(import_module("areal_core.library"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
