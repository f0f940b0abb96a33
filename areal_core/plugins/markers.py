"""The two marks of pluggy: `hookimpl`, which plugins use, and `hookspec`, which only `hooks.py` uses."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "areal"
GROUP: Final = "areal.plugins"
"""The entry-point group in which a distribution names its plugin."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook with the same name."""

hookspec = pluggy.HookspecMarker(PROJECT)
