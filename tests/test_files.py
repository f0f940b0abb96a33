"""The user's own files as modules: which file an import beside a component's means."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.imports import import_reference
from areal_core.files import KeptSources, is_importing_a_script, load_file


def write(folder: Path, **files: str) -> Path:
    """Write files by their paths without `.py`, a double underscore for a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def value(file: Path, attribute: str = "VALUE") -> Any:
    return import_reference(f"{file}:{attribute}", Path("/")).value


@pytest.mark.parametrize(
    "statement",
    [
        "from helper import NAME",
        "from .helper import NAME",
        "import helper as other\nNAME = other.NAME",
        "from tools import NAME",
        "import tools.inner\nNAME = tools.inner.NAME",
        "import tools.inner as inner\nNAME = inner.NAME",
        "from tools.inner import NAME",
        "from . import helper\nNAME = helper.NAME",
        "from plain.inner import NAME",
        "from helper import *",
    ],
)
def test_each_folder_has_neighbors_of_its_own(tmp_path: Path, statement: str) -> None:
    for name in ("one", "two"):
        text = f"NAME = '{name}'\n"
        write(tmp_path / name, helper=text, tools__inner="from helper import NAME\n", plain__inner=text)
        (tmp_path / name / "tools" / "__init__.py").write_text("from .inner import NAME\n")
        late = "def late():\n    import helper\n    return helper.NAME\n"
        write(tmp_path / name, mine=f"{statement}\nVALUE = NAME\n{late}")
    assert [value(tmp_path / name / "mine.py") for name in ("one", "two")] == ["one", "two"]
    assert [value(tmp_path / name / "mine.py", "late")() for name in ("two", "one")] == ["two", "one"]
    assert "helper" not in sys.modules


def test_a_neighbor_comes_before_an_installed_module_for_its_own_folder_alone(tmp_path: Path) -> None:
    write(tmp_path / "one", packaging="NAME = 'mine'\n", mine="import packaging\nVALUE = packaging\n")
    write(tmp_path / "two", mine="import packaging\nVALUE = packaging\n")
    assert value(tmp_path / "one" / "mine.py").NAME == "mine"
    assert value(tmp_path / "two" / "mine.py") is __import__("packaging")


def test_pythons_own_modules_and_a_file_that_is_called_as_what_it_imports_mean_no_neighbor(tmp_path: Path) -> None:
    write(tmp_path, types="NAME = 'mine'\n", packaging="import packaging\nVALUE = packaging\n")
    write(tmp_path, mine="import types\nfrom . import types as own\nVALUE = types, own.NAME\n")
    assert value(tmp_path / "mine.py") == (__import__("types"), "mine")
    assert value(tmp_path / "packaging.py") is __import__("packaging")


def test_a_folder_of_data_hides_no_installed_module(tmp_path: Path) -> None:
    (tmp_path / "packaging").mkdir()
    write(tmp_path, mine="import packaging\nVALUE = packaging\n")
    assert value(tmp_path / "mine.py") is __import__("packaging")


def test_a_file_is_one_module_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path / "v1.5 100%", mine="VALUE = object()\n", other="import mine\n"))
    direct, folder = value(tmp_path / "v1.5 100%" / "mine.py"), tmp_path / "link"
    assert value(folder / "mine.py") is value(folder / ".." / "link" / "mine.py") is direct
    assert value(folder / "other.py", "mine").VALUE is direct


def test_another_process_unpickles_what_a_file_and_its_neighbor_define(tmp_path: Path) -> None:
    write(tmp_path, helper="class Answer:\n    value = 42\n")
    write(tmp_path, mine="from helper import Answer\ndef score():\n    return Answer.value\nVALUE = Answer(), score\n")
    pickled = pickle.dumps(value(tmp_path / "mine.py"))
    code = f"import pickle\nanswer, score = pickle.loads({pickled!r})\nprint(answer.value, score())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "42 42\n"


def test_a_missing_neighbor_and_one_that_fails_are_named(tmp_path: Path) -> None:
    write(tmp_path, mine="import nothing_of_this_name\n", late="import broken\n", broken="1 / 0\n")
    with pytest.raises(Exception, match="No module named 'nothing_of_this_name'"):
        value(tmp_path / "mine.py")
    with pytest.raises(Exception, match=r"ZeroDivisionError.*broken\.py"):
        value(tmp_path / "late.py")


def write_package(folder: Path, text: str, **files: str) -> None:
    """Write a package with an `__init__.py`."""
    write(folder, **files)
    (folder / "__init__.py").write_text(text)


def test_a_package_imports_itself_by_its_own_name(tmp_path: Path) -> None:
    write_package(tmp_path / "tools", "from tools.inner import NAME\n", inner="NAME = 'mine'\n")
    write_package(tmp_path / "packaging", "import packaging.inner\n", inner="NAME = 'mine'\n")
    write(tmp_path, mine="import packaging.inner, tools\nVALUE = tools.NAME, packaging.inner.NAME\n")
    assert value(tmp_path / "mine.py") == ("mine", "mine")


def test_a_package_that_is_installed_from_the_same_folder_exists_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        write_package(folder / "tools_of_mine", "", kinds="class Kind: ...\n")
        write(folder, mine="from tools_of_mine.kinds import Kind as VALUE\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    installed = importlib.import_module("tools_of_mine.kinds")
    assert value(tmp_path / "mine.py") is installed.Kind
    assert value(tmp_path / "other" / "mine.py") is not installed.Kind


def test_a_neighbor_is_the_same_module_whether_or_not_the_current_folder_is_searched(tmp_path: Path) -> None:
    """`python -m` searches the folder, and the command `areal` does not."""
    write(tmp_path, helper="", mine="import helper\nVALUE = helper.__name__\n")
    write(
        tmp_path,
        show="from areal_core.files import load_file\nfrom pathlib import Path\n"
        "print(load_file(Path('mine.py').resolve())[0].VALUE)\n",
    )
    names = [
        subprocess.run([sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
        for way in (["-m", "show"], ["-P", "-c", (tmp_path / "show.py").read_text()])
    ]
    assert names[0] == names[1] != "helper"


def test_a_file_is_imported_again_if_it_or_a_neighbor_has_changed(tmp_path: Path) -> None:
    write(tmp_path, helper="NAME = 'first'\n", mine="import between\nVALUE = between.NAME\n")
    write(tmp_path, between="from helper import NAME\n")
    module, _ = load_file(tmp_path / "mine.py")
    assert load_file(tmp_path / "mine.py")[0] is module
    write(tmp_path, helper="NAME = 'second'\n")
    assert value(tmp_path / "mine.py") == "second"
    write(tmp_path, mine="VALUE = 'third'\n")
    assert value(tmp_path / "mine.py") == "third"


def test_a_name_that_is_resolved_at_run_time_is_relative_to_the_package_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path, helper="NAME = 'mine'\n")
    write(tmp_path, mine="import importlib\nVALUE = importlib.import_module('.helper', __package__).NAME\n")
    assert value(tmp_path / "mine.py") == "mine"


def test_processes_of_a_run_execute_neighbors_as_they_were_when_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, mine="import helper, gone\nVALUE = helper.NAME, gone.NAME\n")
    kept = tmp_path / "run" / "sources"
    kept.mkdir(parents=True)
    for name in ("helper", "gone"):
        KeptSources.place(kept, tmp_path / f"{name}.py").write_text("NAME = 'kept'\n")
    write(tmp_path, helper="NAME = 'changed'\n")
    monkeypatch.setattr(KeptSources, "folder", kept)
    assert value(tmp_path / "mine.py") == ("kept", "kept")


@pytest.mark.parametrize("call", ["areal_core.train()", "areal_core.trl.GRPOTrainer('model')"])
def test_a_script_is_imported_up_to_the_call_that_starts_a_run(tmp_path: Path, call: str) -> None:
    """Also if the script catches exceptions: the call itself would raise one, for it lacks arguments."""
    text = (
        f"def f(): return 7\ntry:\n    import areal_core.trl\n    {call}\nexcept Exception:\n    f = None\nf = None\n"
    )
    write(tmp_path, script=text)
    assert value(tmp_path / "script.py", "f")() == 7
    write(tmp_path, program="import areal_core.files\nVALUE = areal_core.files.is_importing_a_script()\n")
    assert value(tmp_path / "program.py") is True
    assert not is_importing_a_script()
