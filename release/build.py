"""Build the wheels and source distributions of a release from one commit, and check every file.

    python release/build.py [--out dist] [--tag v0.1.0 --repository https://github.com/OWNER/areal]

The program builds HEAD, not the working tree, and each wheel from its source distribution. The address of the
repository is known only when a release is made: `[project.urls]` and the links of every README are made from it. A
build without --repository is a trial: its links lead to a reserved name that never resolves, and it cannot have a tag.
"""

from __future__ import annotations

import argparse
import email
import io
import posixpath
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
TRIAL_REPOSITORY = "https://areal.invalid"
"""Address in the links of a trial build. It never resolves: RFC 2606 reserves `.invalid`."""
URLS = {
    "Source": "",
    "Issues": "/issues",
    "Documentation": "/blob/{tag}/docs/index.md",
    "Changelog": "/blob/{tag}/CHANGELOG.md",
}
"""Paths of `[project.urls]` below the address of the repository."""
METADATA = (
    "Summary",
    "Author",
    "Keywords",
    "License-Expression",
    "License-File",
    "Requires-Python",
    "Classifier",
    "Requires-Dist",
)
IN_SOURCES = ("LICENSE", "README.md", "pyproject.toml")
SOURCES = ("areal_core/", "examples/plugin/", "src/", "tests/", "CHANGELOG.md", "PKG-INFO", ".gitignore", *IN_SOURCES)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)]*)?\)")


class ReleaseError(Exception):
    """The files must not be released; the text names each fault."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check all distributions. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty folder for the files")
    parser.add_argument("--tag", default="", help="the tag that is released; it must be v and the version")
    parser.add_argument("--repository", default="", help="address of the repository; a tag needs it")
    arguments = parser.parse_args(argv)
    try:
        files = build(arguments.out.absolute(), arguments.tag, arguments.repository.rstrip("/"))
    except (ReleaseError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(files)} files in {arguments.out}, checked")
    return 0


def build(out: Path, tag: str = "", repository: str = "") -> list[Path]:
    """Build all distributions of HEAD in `out`. Return the files.

    Raises:
        ReleaseError: `out` is not empty, a tag comes without a repository, versions differ, or a file has a fault.
    """
    if tag and not repository:
        raise ReleaseError(f"the tag {tag} needs --repository ADDRESS: links in the files on the index lead there")
    if not repository:
        print(f"trial build: links lead to {TRIAL_REPOSITORY}; give a release --tag and --repository", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty: a release is nothing but what one commit makes")
    with tempfile.TemporaryDirectory(prefix="areal-release-") as name:
        tree = Path(name)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(tree, filter="data")
        version = check_versions(tree)
        if tag and tag != f"v{version}":
            raise ReleaseError(f"the tag is {tag}, and the version of this commit is {version}: v{version} is its tag")
        folders = distribution_folders(tree)
        for folder in folders:
            add_links(folder, tree, f"v{version}", repository or TRIAL_REPOSITORY)
        with ThreadPoolExecutor(2) as pool:
            for number, folder in enumerate(pool.map(lambda folder: make(folder, out), folders), 1):
                print(f"[{number}/{len(folders)}] {folder.name if folder != tree else 'areal_core'}", flush=True)
    check_files(out, version)
    return sorted(out.iterdir())


def distribution_folders(tree: Path) -> list[Path]:
    """The core's, and each plugin's."""
    return [tree, *sorted(path.parent for path in (tree / "plugins").glob("*/pyproject.toml"))]


def check_versions(tree: Path) -> str:
    """The version that all distributions have, each admitting the others.

    Raises:
        ReleaseError: one has another version, or requires another one of a neighbour.
    """
    files = [folder / "pyproject.toml" for folder in distribution_folders(tree)]
    described = [tomllib.loads(path.read_text())["project"] for path in files]
    found = {project["name"]: project["version"] for project in described}
    version = found["areal-core"]
    wrong = [f"{name} is {other}" for name, other in found.items() if other != version]
    if f'__version__ = "{version}"' not in (tree / "areal_core" / "__init__.py").read_text():
        wrong.append("areal_core.__version__ is another one")
    for project in described:
        extras = project.get("optional-dependencies", {}).values()
        for line in [*project["dependencies"], *(each for extra in extras for each in extra)]:
            wanted = Requirement(line)
            if wanted.name in found and not (wanted.specifier and wanted.specifier.contains(version)):
                wrong.append(f"{project['name']} requires {line}")
    if wrong:
        raise ReleaseError(f"areal-core is {version}, but {'; '.join(wrong)}: run release/set_version.py VERSION")
    return version


def add_links(folder: Path, tree: Path, tag: str, repository: str) -> None:
    """Make the links of a distribution's README absolute, and add `[project.urls]` to its pyproject.toml."""
    page, described = folder / "README.md", folder / "pyproject.toml"
    place = folder.relative_to(tree).as_posix()
    page.write_text(link_to_repository(page.read_text(), place, repository, tag))
    lines = "".join(f'{name} = "{repository}{path.format(tag=tag)}"\n' for name, path in URLS.items())
    described.write_text(f"{described.read_text()}\n[project.urls]\n{lines}")


def link_to_repository(text: str, folder: str, repository: str, tag: str) -> str:
    """Return a page of `folder` whose relative links are addresses of the files at a tag; images link to raw files."""

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[3]))
        kind = "raw" if found[1] else "blob"
        words = _LINK.sub(replaced, found[2])
        return f"{found[1]}[{words}]({repository}/{kind}/{tag}/{path}{found[4] or ''})"

    return _LINK.sub(replaced, text)


def make(folder: Path, out: Path) -> Path:
    """The source distribution of a folder, and from it the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{folder.name} cannot be built:\n{done.stdout}{done.stderr}")
    return folder


def check_files(out: Path, version: str) -> None:
    """Check each file for what an index and a user need.

    Raises:
        ReleaseError: twine refuses a file; a file lacks its license, types, metadata or entry point; a wheel or source
            distribution has no counterpart; a page has a relative link.
    """
    files = sorted(str(path) for path in out.iterdir())
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    if checked.returncode:
        raise ReleaseError(f"twine: {checked.stdout}{checked.stderr}")
    wrong = [f"{path.name}: {fault}" for path in sorted(out.glob("*.whl")) for fault in faults_of(path, version)]
    names = {path.name.split("-")[0] for path in out.glob("*.whl")}
    for path in sorted(out.glob("*.tar.gz")):
        with tarfile.open(path) as source:
            inside = {name.partition("/")[2] for name in source.getnames()}
        wrong += [f"{path.name}: no {name}" for name in IN_SOURCES if name not in inside]
        wrong += [f"{path.name}: holds {name}" for name in sorted(inside - {""}) if not name.startswith(SOURCES)]
        wrong += [f"{path.name}: no wheel"] * (path.name.split("-")[0] not in names)
    if wrong:
        raise ReleaseError("; ".join(wrong))


def faults_of(wheel: Path, version: str) -> list[str]:
    """Return the faults of a wheel: missing files and metadata, foreign files, relative links."""
    package = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"{package}-{version}.dist-info"
        if f"{info}/METADATA" not in names:
            return [f"is not of version {version}"]
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        points = archive.read(f"{info}/entry_points.txt").decode() if f"{info}/entry_points.txt" in names else ""
    faults = [f"holds {name}" for name in names if name.split("/")[0] not in {package, info}]
    faults += [f"no {name}" for name in (f"{info}/licenses/LICENSE", f"{package}/py.typed") if name not in names]
    faults += [f"metadata without {key}" for key in METADATA if not metadata.get(key)]
    urls = {line.partition(",")[0] for line in metadata.get_all("Project-URL", ())}
    faults += [f"metadata without Project-URL {name}" for name in URLS if name not in urls]
    page = str(metadata.get_payload())
    faults += [f"its page links to {link[3]}, which is relative" for link in _LINK.finditer(page)]
    for line in points.splitlines():
        module = line.partition("=")[2].strip().partition(":")[0].replace(".", "/")
        if module and not {f"{module}.py", f"{module}/__init__.py"} & names:
            faults.append(f"its entry point names {module}, which is not in it")
    return faults


if __name__ == "__main__":
    sys.exit(main())
