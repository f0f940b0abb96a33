"""Make the areal of this checkout importable in an environment in which it is not installed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = [ROOT, *(ROOT / "plugins" / f"areal_{name}" for name in ("hf", "fsdp", "grpo", "finetuning"))]


def make_importable(folder: Path) -> None:
    """Add areal's packages to `sys.path`, and the metadata by which areal finds its plugins.

    Args:
        folder: Empty folder for the metadata, which pip would write for an installed distribution.
    """
    for source in DISTRIBUTIONS:
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        information = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        information.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
        (information / "METADATA").write_text("\n".join(lines) + "\n")
        points = project.get("entry-points", {}).get("areal.plugins", {})
        entries = "".join(f"{name} = {module}\n" for name, module in points.items())
        (information / "entry_points.txt").write_text(f"[areal.plugins]\n{entries}")
        sys.path.insert(0, str(source / "src" if (source / "src").is_dir() else source))
    sys.path.insert(0, str(folder))
