from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.checks.installed import is_installed

if TYPE_CHECKING:
    import pytest


def make_distribution(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    lines = [f"{name}/__init__.py,sha256=x,0", f"{information.name}/RECORD,,", "../../bin/tool,sha256=y,3"]
    (information / "RECORD").write_text("\n".join(lines))


def test_a_package_of_pip_install_target_is_installed_and_the_users_files_beside_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_distribution(tmp_path, "heavy")
    (tmp_path / "mine.py").touch()
    assert not is_installed(tmp_path / "heavy" / "__init__.py"), "no interpreter searches this folder"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed(tmp_path / "heavy" / "__init__.py")
    assert is_installed(tmp_path / "heavy" / "below" / "library.so")
    assert not is_installed(tmp_path / "mine.py")


def test_an_editable_package_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hatchling and setuptools install it: metadata elsewhere, or `NAME.egg-info` beside the sources."""
    (tmp_path / "src" / "own").mkdir(parents=True)
    (tmp_path / "src" / "own.egg-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    assert not is_installed(tmp_path / "src" / "own" / "__init__.py")


def test_pythons_own_modules_are_installed_and_a_project_beside_the_interpreter_is_not() -> None:
    assert is_installed(Path(sysconfig.get_path("stdlib")) / "json" / "__init__.py")
    assert not is_installed(Path(sysconfig.get_path("data")) / "src" / "app" / "reward.py")
