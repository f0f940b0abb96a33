"""The hook that this plugin adds."""
# A specification is a signature with documentation. pluggy never calls it, so it has no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.plugins import Component


@hookspec
def areal_fsdp_optimizers() -> Iterable[Component]:
    """Supply optimizers of the engine `fsdp`: functions with the signature of `areal_fsdp.optimizers.muon`.

        @hookimpl
        def areal_fsdp_optimizers():
            return [Component("lion", "sign of the momentum", target="areal_lion.optimizers:lion")]

    A config chooses it with `train_engine: {type: fsdp/fsdp, optimizer: lion/lion}`, or a function of a file as
    `optimizer: path/to/file.py:lion`.

    Returns: a `Component` for each optimizer. `target` is a function.
    """
