"""The marks of pluggy: `hookimpl` for functions of a plugin, `hookspec` for the hooks that they implement."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "areal"
GROUP: Final = "areal.plugins"
"""The entry-point group in which a distribution names its plugin."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Mark a function of a plugin as the implementation of the hook with the same name.

pluggy's options apply: `@hookimpl(tryfirst=True)`, `trylast=True`, and `wrapper=True` for a generator around all other
implementations.
"""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Mark a function as the specification of a hook that a plugin adds; see `areal_add_hooks`."""
