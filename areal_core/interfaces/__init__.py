"""The definitions of what components implement: protocols, base classes with defaults, and the records they exchange.

The rollout half and the training half of a run share only this package and `areal_core.data`. The public names are in
`areal_core.sdk`, `areal_core.engines`, `areal_core.servers` and `areal_core.launchers`. Importing them from this
package is deprecated: its stub lists the names that were once imported from here, and gets no new ones.
"""

from pathlib import Path

from areal_core.exports import deprecated_names, stub_names

_HERE = Path(__file__)
_HOMES = {
    name: f"areal_core.{module}.{name}"
    for module in ("sdk", "engines", "servers", "launchers")
    for name in stub_names(_HERE.parents[1] / f"{module}.pyi")
}

__getattr__ = deprecated_names(
    __name__,
    {name: _HOMES[name] for name in stub_names(_HERE.with_suffix(".pyi"))}
    | {"EndMeans": "areal_core.launchers.OnExit", "FindsModel": "areal_core.engines.ModelResolver"},
)
