"""What `areal doctor` asks of this plugin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from areal_core.plugins import Finding
from areal_vllm.adapter import KNOWN

RESOLVED: Final = {"0.32.0": {"torch": "2.13.0", "transformers": "5.19.0"}}
"""What the table of versions (docs/reference/versions.md) has beside a vLLM that is in areal's environment."""


def check_program() -> Finding:
    """Whether vLLM is beside areal in a version that this plugin was tested with, and beside what."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return Finding(True, "not installed beside areal; settings `program` and `addresses` name one elsewhere")
    if not KNOWN.contains(found):
        return Finding(False, f"vllm {found}; this plugin was tested with {KNOWN}")
    beside = {name: (version(name).partition("+")[0], wanted) for name, wanted in RESOLVED.get(found, {}).items()}
    others = [f"{name} {there} (in the table {wanted})" for name, (there, wanted) in beside.items() if there != wanted]
    return Finding(True, "; ".join([f"vllm {found}", *others]))
