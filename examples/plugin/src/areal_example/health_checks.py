"""A health check: `areal doctor` runs it."""

from __future__ import annotations

import shutil

from areal_core.plugins import Finding


def c_compiler() -> Finding:
    """A C compiler is installed, which torch.compile needs."""
    found = shutil.which("cc")
    return Finding(found is not None, found or "cc is missing: install gcc or clang")
