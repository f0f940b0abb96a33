"""What `areal doctor` asks of this plugin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from areal_core.plugins import Finding
from areal_vllm.adapter import KNOWN


def check_program() -> Finding:
    """Whether vLLM is installed beside areal, in a version that this plugin was tested with."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return Finding(True, "not installed beside areal; settings `program` and `addresses` name one elsewhere")
    is_known = KNOWN.contains(found)
    return Finding(is_known, f"vllm {found}" + ("" if is_known else f"; this plugin was tested with {KNOWN}"))
