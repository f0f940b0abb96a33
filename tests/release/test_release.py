"""What a tag makes: every distribution of one version, with pages and metadata that an index can show."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import areal_core

if TYPE_CHECKING:
    from types import ModuleType

    from tests.conftest import Box

ROOT = Path(__file__).parents[2]


def program(name: str) -> ModuleType:
    """A file of the folder `release`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, set_version = program("build"), program("set_version")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of the repository that hold a version, to be changed."""
    projects = [
        *ROOT.glob("plugins/*/pyproject.toml"),
        *ROOT.glob("examples/*/pyproject.toml"),
        ROOT / "pyproject.toml",
    ]
    names = ("areal_core/__init__.py", "CHANGELOG.md", "CITATION.cff", *set_version.PAGES)
    for path in [*projects, *(ROOT / name for name in names)]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_all_distributions_are_of_one_version_and_admit_each_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert build.check_versions(ROOT) == project["version"]


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        ("plugins/areal_grpo/pyproject.toml", 'version = "', 'version = "9', "areal-grpo is 9"),
        ("plugins/areal_grpo/pyproject.toml", '"areal-core>', '"areal-core>=99,>', "areal-grpo requires"),
        ("plugins/areal_fsdp/pyproject.toml", '"areal-vision>', '"areal-vision<0,>', "areal-fsdp requires"),
        ("areal_core/__init__.py", '__version__ = "', '__version__ = "9', "areal_core.__version__ is another one"),
    ],
)  # fmt: skip
def test_what_differs_is_not_released(tree: Path, path: str, old: str, new: str, told: str) -> None:
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new, 1))
    with pytest.raises(build.ReleaseError, match=told):
        build.check_versions(tree)


@pytest.mark.parametrize("version", ["99.0.0", "99.0.0rc1", "99.1.2"])
def test_a_new_version_is_written_everywhere_at_once(tree: Path, version: str) -> None:
    before = (tree / "examples/plugin/pyproject.toml").read_text()
    changed = set_version.set_version(tree, Version(version))
    assert build.check_versions(tree) == version
    assert {path.relative_to(tree).as_posix() for path in changed} == {
        path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()
    }
    text = (tree / "CHANGELOG.md").read_text()
    assert text.index("## Unreleased") < text.index(f"## {version} - ")
    example = tomllib.loads((tree / "examples/plugin/pyproject.toml").read_text())["project"]
    assert Requirement(example["dependencies"][0]).specifier.contains(version)
    assert example["version"] == tomllib.loads(before)["project"]["version"]
    assert set_version.set_version(tree, Version(version)) == []


def test_links_of_the_indexs_pages_lead_to_files_of_the_repository() -> None:
    address = "https://h.example/o/areal"
    pages = [ROOT / "README.md", *sorted(ROOT.glob("plugins/*/README.md"))]
    for page in pages:
        folder = page.parent.relative_to(ROOT).as_posix()
        shown = build.link_to_repository(page.read_text(), folder, address, "v1.2.3")
        for target in re.findall(r"\]\((?!#)([^)]+)\)", shown):
            assert target.startswith("https://"), (page, target)
            if target.startswith(address):
                path = re.sub(r"^/(blob|raw)/v1\.2\.3/|#.*", "", target.removeprefix(address))
                assert (ROOT / path).exists(), (page, target)
        assert f"{address}/blob/v1.2.3/docs/" in shown, page
    assert f"]({address}/raw/v1.2.3/docs/curve.svg)" in build.link_to_repository(
        (ROOT / "README.md").read_text(), ".", address, "v1.2.3"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_built_passes_every_check(tmp_path: Path) -> None:
    """The core and a plugin; `release/build.py` makes them all, of HEAD."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for name in ("areal_core", "plugins/areal_sglang", "examples/plugin"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree / name)
    out.mkdir()
    for folder in (tree, tree / "plugins/areal_sglang"):
        build.add_links(folder, tree, f"v{build.check_versions(tree)}", "https://h.example/o/areal")
        build.make(folder, out)
    version = build.check_versions(tree)
    build.check_files(out, version)
    wheel = next(out.glob("areal_sglang-*.whl"))
    with zipfile.ZipFile(wheel) as archive_file:
        text = archive_file.read(f"areal_sglang-{version}.dist-info/METADATA").decode()
    assert "Project-URL: Source, https://h.example/o/areal\n" in text
    assert "](https://h.example/o/areal/blob/v" in text
    assert "Provides-Extra: engine\n" in text
    with tarfile.open(next(out.glob("areal_core-*.tar.gz"))) as sources:
        assert not [name for name in sources.getnames() if "/plugins/" in name and "areal_core/" not in name]
    broken = shutil.copy(wheel, tmp_path / wheel.name)
    with zipfile.ZipFile(broken, "a") as archive_file:
        archive_file.writestr("tests/__init__.py", "")
    assert build.faults_of(Path(broken), version) == ["holds tests/__init__.py"]


def test_a_page_with_a_relative_link_and_metadata_without_addresses_are_faults(tmp_path: Path) -> None:
    metadata = "Name: areal-x\nSummary: x\nProject-URL: Source, https://h.example\n\n[guide](../../docs/guide.md)\n"
    wheel = tmp_path / "areal_x-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive_file:
        archive_file.writestr("areal_x-1.2.3.dist-info/METADATA", metadata)
    faults = build.faults_of(wheel, "1.2.3")
    assert "its page links to ../../docs/guide.md, which is relative" in faults
    assert "metadata without License-File" in faults
    assert "metadata without Project-URL Issues" in faults
    assert "metadata without Project-URL Source" not in faults


def test_a_tag_needs_the_address_of_the_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--out", str(tmp_path), "--tag", "v1.2.3"]) == 1
    assert "error: the tag v1.2.3 needs --repository ADDRESS" in capsys.readouterr().err


def test_all_distributions_have_the_same_authors_license_and_classifiers() -> None:
    folders = build.distribution_folders(ROOT)
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders]
    assert len(projects) == 21
    for folder, project in zip(folders, projects, strict=True):
        for key in ("authors", "license", "license-files", "classifiers", "requires-python"):
            assert project[key] == projects[0][key], (folder, key)
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), folder
        assert len(set(project["keywords"])) == len(project["keywords"]) >= 4, folder
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} < set(projects[0]["classifiers"])
    pythons = [line.rpartition(" ")[2] for line in projects[0]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    admitted = SpecifierSet(projects[0]["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(30) if admitted.contains(f"3.{minor}")]


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.whl").touch()
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_core_from_an_index_proposes_what_the_index_has(box: Box) -> None:
    """pip notes where a distribution came from, unless that was an index."""
    core = box.distribution("areal-core", areal_core.__version__, (), "")
    assert "  install it with: pip install areal-grpo\n" in box.areal("run", "--plugins", "grpo").err
    core.joinpath("direct_url.json").write_text('{"url": "file:///somewhere/areal", "dir_info": {"editable": true}}')
    refused = box.areal("run", "--plugins", "grpo").err
    assert "  install it with: pip install ./plugins/areal_grpo (in a clone of areal)\n" in refused
