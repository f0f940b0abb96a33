"""Print the environments that this interpreter has, as JSON. areal runs this file in the interpreters that are asked.

The result is a list of `{"library", "version", "name", "use", "needs"}`: the library and its version, the name of an
environment, the keys that choose it in a config, and the packages that it asks for and that are not installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def installed(name: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def folder_of(package: str) -> Path | None:
    """Return the folder of a package without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def users_of(library: str) -> Iterator[tuple[str, Path]]:
    """Yield the packages of the distributions that need a library, with their folders."""
    for distribution in metadata.distributions():
        matches = filter(None, map(NAME.match, distribution.requires or ()))
        needed = {match[0].lower().replace("_", "-") for match in matches}
        if library not in needed:
            continue
        tops = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1 and file.suffix == ".py"}
        for top in sorted(tops):
            if folder := folder_of(top):
                yield top, folder


def verifiers() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the tasksets that verifiers brings, and those of packages that need it."""
    own = folder_of("verifiers")
    for file in sorted(own.glob("v1/tasksets/*/__init__.py") if own else ()):
        needs = [] if file.parent.name != "harbor" or installed("harbor") else ["harbor"]
        yield file.parent.name, f"taskset: {file.parent.name}", needs
    for name, folder in users_of("verifiers"):
        module = folder / "__init__.py"
        if module.is_file() and "Taskset" in module.read_text(errors="replace"):
            yield name, f"taskset: {name.replace('_', '-')}", []


def nemo_gym() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the resources servers, with what their requirements.txt asks for and is not installed."""
    folder = folder_of("resources_servers")
    for file in sorted(folder.glob("*/app.py") if folder else ()):
        path, needs = file.parent / "requirements.txt", []
        for line in path.read_text().splitlines() if path.is_file() else ():
            match = NAME.match(line.split("-e nemo-gym")[0].strip())
            if match and not installed(match[0]):
                needs.append(match[0])
        yield file.parent.name, f"server: {file.parent.name}", needs


def openenv() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the packages that need OpenEnv and have a web application."""
    for name in ("openenv", "openenv-core"):
        for package, folder in users_of(name):
            if (folder / "server" / "app.py").is_file():
                yield package, f"app: {package}.server.app:app", []


LIBRARIES: dict[str, Any] = {"verifiers": verifiers, "nemo-gym": nemo_gym, "openenv": openenv}


def main() -> None:
    """Print the environments of every library that is installed."""
    sys.path.append(str(Path.cwd()))
    found = []
    for library, environments in LIBRARIES.items():
        if version := installed(library):
            listed = [{"name": name, "use": use, "needs": needs} for name, use, needs in environments()]
            found += [
                {"library": library, "version": version, **each}
                for each in listed or [{"name": "", "use": "", "needs": []}]
            ]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
