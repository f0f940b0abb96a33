"""Resolve the environments of release/versions/rows.yaml, without downloading them, and write a lock file for each.

    python release/lock.py [--check] [--upgrade]

A lock file holds libraries of others; pip takes it as constraints: pip install -c release/versions/sglang.txt ...
Versions that are written there stay while they fit; --upgrade takes the newest. --check writes nothing, and fails where
a file would change.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from build import distribution_folders  # the program beside this one

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ROOT / "release" / "versions"
EXTRAS = {"areal-rewards": "datasets,math", "areal-fsdp": "lora"}
"""Extras that GPU users have; engines are rows of the table, and the others go with any of them."""
FOR_TESTS = {"areal-testing"}
"""Distributions that no run needs: a lock file holds nothing of theirs."""
PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or compare them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is not what is resolved")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args(argv)
    stale = []
    for name, wanted in environments():
        path = VERSIONS / f"{name}.txt"
        before = path.read_text() if path.is_file() else ""
        try:
            text = resolve(name, wanted, "" if arguments.upgrade else before)
        except subprocess.CalledProcessError:  # uv has said why
            print(f"error: {name} cannot be resolved: {', '.join(wanted)}", file=sys.stderr)
            return 1
        print(f"{name}: {text.count(chr(10)) - 1} distributions")
        if text != before:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text)
    if stale and arguments.check:
        print(f"error: {', '.join(stale)} would change: run release/lock.py", file=sys.stderr)
    return 1 if stale and arguments.check else 0


def environments() -> Iterator[tuple[str, list[str]]]:
    """Name and requirements of each environment of the table."""
    for row in yaml.safe_load((VERSIONS / "rows.yaml").read_text()).values():
        yield from row["environments"].items()


def distributions() -> dict[str, Path]:
    """The folder of each distribution of areal that a run may need, by name."""
    folders = distribution_folders(ROOT)
    named = {tomllib.loads((one / "pyproject.toml").read_text())["project"]["name"]: one for one in folders}
    return {name: folder for name, folder in named.items() if name not in FOR_TESTS}


def resolve(name: str, wanted: Sequence[str], before: str) -> str:
    """The lock file of an environment; the versions of `before` are kept where they fit.

    Raises:
        CalledProcessError: there is no such environment, or no network; uv has said why.
    """
    ours = distributions()
    lines = [line for line in wanted if line != "areal"]
    if "areal" in wanted:
        lines += [f"{one}{f'[{EXTRAS[one]}]' if one in EXTRAS else ''} @ {path.as_uri()}" for one, path in ours.items()]
    with tempfile.TemporaryDirectory() as folder:
        requirements, lock = Path(folder, "in.txt"), Path(folder, "lock.txt")
        requirements.write_text("\n".join(lines))
        lock.write_text(before)
        left_out = [word for one in ours for word in ("--no-emit-package", one)]
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *PLATFORM, *left_out]
        subprocess.run(
            [*command, "--output-file", str(lock), str(requirements)], check=True, cwd=folder, stdout=subprocess.DEVNULL
        )
        pins = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    heading = f"# Resolved by release/lock.py for Linux with CUDA, Python 3.12: {', '.join(wanted)}"
    return "\n".join([heading, *pins]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
