"""The definitions of what components implement: protocols, base classes with defaults, and the records they exchange.

The rollout half and the training half of a run share only this package and `areal_core.data`. The public names are in
`areal_core.sdk`, `areal_core.engines`, `areal_core.servers` and `areal_core.launchers`. Importing them from this
package is deprecated.
"""

from pathlib import Path

from areal_core.exports import deprecated_names, stub_names

_STUBS = [Path(__file__).parents[1] / f"{module}.pyi" for module in ("sdk", "engines", "servers", "launchers")]

__getattr__ = deprecated_names(
    __name__,
    {
        name: f"areal_core.{stub.stem}.{name}"
        for stub in _STUBS
        for name, module in stub_names(stub).items()
        if module.startswith(__name__)
    }
    | {"EndMeans": "areal_core.launchers.OnExit", "FindsModel": "areal_core.engines.ModelResolver"},
)
