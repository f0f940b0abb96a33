"""Health checks of this plugin for `areal doctor`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from areal_core.plugins import Finding
from areal_vllm.adapter import KNOWN

RESOLVED: Final = {"0.32.0": {"torch": "2.13.0", "transformers": "5.19.0"}}
"""Versions of other packages that docs/reference/versions.md lists for a vLLM in areal's environment."""


def check_program() -> Finding:
    """Check the version of vLLM in areal's environment, and list packages whose version differs from the table."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return Finding(True, "not installed in areal's environment; `program` and `addresses` name servers elsewhere")
    if not KNOWN.contains(installed):
        return Finding(False, f"vllm {installed}; this plugin was tested with {KNOWN}")
    versions = {name: (version(name).partition("+")[0], listed) for name, listed in RESOLVED.get(installed, {}).items()}
    differing = [f"{name} {own} (in the table {listed})" for name, (own, listed) in versions.items() if own != listed]
    return Finding(True, "; ".join([f"vllm {installed}", *differing]))
