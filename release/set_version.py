"""Write a version into every distribution, with the ranges in which they require each other, and date the changelog.

python release/set_version.py 0.2.0
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/extend/plugin.md", "docs/extend/public.md", "areal_core/plugins/__init__.py")
"""They show the range that a plugin must have."""
DISTRIBUTIONS = (".", "plugins/*", "examples/plugin", "examples/algorithms")


def main() -> int:
    """Write it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the next one, such as 0.2.0")
    text = parser.parse_args().version
    try:
        version = Version(text)
        is_plain = str(version) == text and len(version.release) == 3 and not version.local and not version.epoch
    except InvalidVersion:
        is_plain = False
    if not is_plain:
        print(f"error: {text} is no version of a release, such as 0.2.0 or 0.2.0rc1", file=sys.stderr)
        return 2
    changed = set_version(ROOT, version)
    print("\n".join(f"wrote {path.relative_to(ROOT)}" for path in changed))
    return 0


def set_version(root: Path, version: Version) -> list[Path]:
    """Write it below `root`; the files that changed.

    Before 1.0 a minor version may break plugins, so that the ranges end at the next one. They begin at this version,
    because our own plugins use what is not public and are tested with the core that they are released with.
    """
    minor = f"{version.major}.{version.minor}"
    end = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    bounds = f">={minor if version == Version(minor) else version},<{end}"
    described = sorted(path for place in DISTRIBUTIONS for path in root.glob(f"{place}/pyproject.toml"))
    edits = {path: [(r'("areal-[a-z-]+(?:\[[a-z,-]+\])?)>=[\da-z.]+,<[\d.]+', rf"\g<1>{bounds}")] for path in described}
    for path in described:
        if not path.is_relative_to(root / "examples"):  # those have versions of their own
            edits[path].append((r'(?m)^version = "[^"]+"', f'version = "{version}"'))
    edits |= {root / name: [(r"areal-core>=[\da-z.]+,<[\d.]+", f"areal-core{bounds}")] for name in PAGES}
    edits[root / "areal_core" / "__init__.py"] = [(r'__version__ = "[^"]+"', f'__version__ = "{version}"')]
    edits[root / "CITATION.cff"] = [(r"(?m)^version: .*", f"version: {version}")]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    heading = f"## Unreleased\n\n## {version} - {today}"
    edits[root / "CHANGELOG.md"] = [(rf"(?m)^## Unreleased\n(?!\n## {re.escape(str(version))} )", f"{heading}\n")]
    changed = []
    for path, pairs in edits.items():
        before = after = path.read_text() if path.is_file() else ""
        for pattern, replacement in pairs:
            after = re.sub(pattern, replacement, after)
        if after != before:
            path.write_text(after)
            changed.append(path)
    return changed


if __name__ == "__main__":
    sys.exit(main())
