"""Health checks for `areal doctor`."""

from __future__ import annotations

from areal_core.errors import ConfigError
from areal_core.plugins import Finding


def check_bubblewrap() -> Finding:
    """Return whether the sandbox bubblewrap works here, and what it can limit."""
    from areal_sandboxes.bubblewrap import Bubblewrap
    from areal_sandboxes.config import BubblewrapSettings

    try:
        return Finding(True, Bubblewrap(BubblewrapSettings()).description)
    except ConfigError as error:
        reason = "; ".join((error.message, *error.hints))
        return Finding(True, f"not usable here, and needed only if a config names sandboxes/bubblewrap: {reason}")
