"""The core's own components, registered through the same path as everybody else's, as plugin `core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.plugins.records import Component


@hookimpl
def areal_workflows() -> Iterable[Component]:
    """How an episode is played."""
    return []


@hookimpl
def areal_launchers() -> Iterable[Component]:
    """How the processes of a run are started."""
    return []


@hookimpl
def areal_datasets() -> Iterable[Component]:
    """Where prompts come from."""
    return []
