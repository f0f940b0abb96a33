"""The kind of component that this plugin adds: optimizers of the engine `fsdp`."""

from __future__ import annotations

from typing import Final

from areal_core.plugins import Kind

OPTIMIZERS: Final = Kind("fsdp_optimizers", "optimizer")
