"""Names of functions: a file and an attribute, an installed module, or a pickle in the folder of the run."""

from __future__ import annotations

import functools
import importlib.util
import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.imports import import_reference
from areal_core.errors import ConfigError
from areal_core.library.functions import reference

if TYPE_CHECKING:
    from types import ModuleType


def at_the_top(completion: str) -> float:
    return float(len(completion))


class Reward:
    def __init__(self, worth: float) -> None:
        self.worth = worth

    def __call__(self, completion: str) -> float:
        return self.worth * len(completion)


def program(text: str, **values: Any) -> ModuleType:
    """The main module of a program without a file, such as a notebook."""
    module: Any = type(sys)("__main__")
    exec(compile(text, "<a cell>", "exec"), vars(module))
    vars(module).update(values)
    return module


def loaded(name: str) -> Any:
    return import_reference(name, Path("/")).value


def test_a_function_of_a_file_goes_by_its_path(tmp_path: Path) -> None:
    assert reference(at_the_top, tmp_path / "functions") == f"{Path(__file__).resolve()}:at_the_top"
    assert reference(Reward, tmp_path / "functions") == f"{Path(__file__).resolve()}:Reward"
    assert not (tmp_path / "functions").exists()


def test_a_function_of_an_installed_package_goes_by_its_module(tmp_path: Path) -> None:
    assert reference(shlex.quote, tmp_path) == "shlex:quote"
    assert reference(json.loads, tmp_path) == "json:loads"


def test_a_module_beside_the_script_goes_by_its_path(tmp_path: Path) -> None:
    """Only the script searches its folder: the run's processes would not find the module by its name."""
    (tmp_path / "helper.py").write_text("def f(completion): return 1.0\n")
    code = (
        "import helper, pathlib; from areal_core.library.functions import reference; "
        "print(reference(helper.f, pathlib.Path('functions')))"
    )
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{tmp_path.resolve()}/helper.py:f"


def test_what_has_no_name_in_a_file_is_pickled_with_what_it_uses(tmp_path: Path) -> None:
    worth = 3.0

    def nested(completion: str) -> float:
        return worth * len(completion)

    for target, expected in (
        (nested, 6.0),
        (lambda completion: 2 * nested(completion), 12.0),
        (functools.partial(nested), 6.0),
        (Reward(5.0), 10.0),
        (Reward(7.0).__call__, 14.0),
    ):
        assert loaded(reference(target, tmp_path / "run" / "functions"))("ab") == expected
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "functions").iterdir()} == {0o600}


def test_functions_with_one_source_and_different_values_stay_apart(tmp_path: Path) -> None:
    def worth(value: float) -> Any:
        return lambda completion: value * len(completion)

    def scaled(completion: str, factor: float) -> float:
        return factor * len(completion)

    text = "def f(completion):\n    return BASE.value\n"
    bases = [type("Base", (), {"value": value}) for value in (1.0, 2.0)]
    for first, second in (
        (functools.partial(scaled, factor=1.0), functools.partial(scaled, factor=2.0)),
        (Reward(1.0), Reward(2.0)),
        [lambda completion: 1.0, lambda completion: 2.0],
        (worth(1.0), worth(2.0)),
        (worth(Reward(1.0).worth), worth(Reward(2.0).worth)),
        tuple(program(text, BASE=base).f for base in bases),
    ):
        names = [reference(target, tmp_path) for target in (first, second)]
        assert [loaded(name)("a") for name in names] == [1.0, 2.0]


def test_the_source_and_the_plain_values_that_it_uses_stand_beside_the_pickle(tmp_path: Path) -> None:
    module = program("def f(completion):\n    return BASE * len(completion)\n", BASE=3, unused=4)
    shown = Path(reference(module.f, tmp_path).rpartition(":")[0]).read_text()
    assert "BASE = 3" in shown
    assert "unused" not in shown
    assert "(the source of f is not known)" in shown


def test_a_pickle_that_was_exchanged_is_refused(tmp_path: Path) -> None:
    names = [reference(Reward(worth), tmp_path) for worth in (1.0, 2.0)]
    first, second = (Path(name.rpartition(":")[0]).with_suffix(".pickle") for name in names)
    first.write_bytes(second.read_bytes())
    with pytest.raises(Exception, match=r"\.pickle has changed since the run started: restore it"):
        loaded(names[0])


def test_a_value_that_no_other_process_can_have_is_reported(tmp_path: Path) -> None:
    module = program("def f(completion):\n    return float(held.locked())\n", held=threading.Lock())
    with pytest.raises(ConfigError, match=r"f cannot be pickled for the processes of the run: TypeError: .*lock"):
        reference(module.f, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_python_refuses_the_pickle(tmp_path: Path) -> None:
    name = reference(program("def f(completion):\n    return 1.0\n").f, tmp_path)
    module = Path(name.rpartition(":")[0])
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert loaded(name)("") == 1.0
    module.write_text(module.read_text().replace(f'python="{own}"', 'python="2.7"'))
    with pytest.raises(Exception, match=rf"f was pickled by Python 2\.7, and this is Python {own}.*resume the run"):
        loaded(name)


def test_cloudpickle_is_needed_for_nothing_else() -> None:
    """Sockets, trajectories and checkpoints have no pickles; the functions of a notebook are the one exception."""
    core = Path(importlib.util.find_spec("areal_core").submodule_search_locations[0])  # type: ignore[union-attr,index]
    using = [path for path in core.rglob("*.py") if "pickle." in path.read_text(encoding="utf-8")]
    assert [path.relative_to(core).as_posix() for path in using] == ["library/functions.py"]
