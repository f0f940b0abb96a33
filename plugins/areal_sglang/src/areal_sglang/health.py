"""What `areal doctor` asks of this plugin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from areal_core.plugins import Finding
from areal_sglang.adapter import KNOWN

RESOLVED: Final = {"0.5.23": {"torch": "2.14.1", "transformers": "5.19.0"}}
"""What the table of versions (docs/reference/versions.md) has beside a SGLang that is in areal's environment."""


def check_program() -> Finding:
    """Whether SGLang is beside areal in a version that this plugin was tested with, and beside what."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Finding(True, "not installed beside areal; settings `program` and `addresses` name one elsewhere")
    if not KNOWN.contains(found):
        return Finding(False, f"sglang {found}; this plugin was tested with {KNOWN}")
    beside = {name: (version(name).partition("+")[0], wanted) for name, wanted in RESOLVED.get(found, {}).items()}
    others = [f"{name} {there} (in the table {wanted})" for name, (there, wanted) in beside.items() if there != wanted]
    return Finding(True, "; ".join([f"sglang {found}", *others]))
