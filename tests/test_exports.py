"""Public modules: names are imported on first use, and a deprecated name warns and works."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import areal_core
import areal_core.library
from areal_core import interfaces, launchers, sdk
from areal_core.exports import PUBLIC_MODULES, stub_names
from areal_core.rewards.scoring import RewardSum, WeightedReward
from areal_testing.fakes import FakeEngine

STUB = """\
from colorsys import hls_to_rgb as hls_to_rgb
from fractions import Fraction as Fraction
from typing import Any
"""
MODULE = """\
from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(
    __name__, __file__, deprecated={"Ratio": "fractions.Fraction", "gone": "fractions.nothing"}
)
"""


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A public module, `some_public`, that can be imported."""
    (tmp_path / "some_public.pyi").write_text(STUB)
    (tmp_path / "some_public.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_public", raising=False)
    return tmp_path


def test_a_name_is_imported_on_first_use(public: Path) -> None:
    is_there = "print('colorsys' in sys.modules)"
    code = f"import some_public, sys\n{is_there}\nsome_public.hls_to_rgb\n{is_there}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=public, env={"PYTHONPATH": f"{public}:{':'.join(sys.path)}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.usefixtures("public")
def test_the_names_are_those_that_the_stub_exports() -> None:
    import some_public

    assert some_public.__all__ == ["hls_to_rgb", "Fraction"]
    assert {"hls_to_rgb", "Fraction"} < set(dir(some_public))
    with pytest.raises(AttributeError, match="module 'some_public' has no attribute 'Any'"):
        some_public.Any  # noqa: B018


def test_a_deprecated_name_warns_at_the_line_that_uses_it_and_works(public: Path) -> None:
    script = public / "script.py"
    script.write_text("\nfrom some_public import Ratio\n\nassert Ratio(1, 2) == 0.5\n")
    done = subprocess.run(
        [sys.executable, "-W", "always", str(script)], env={"PYTHONPATH": f"{public}:{':'.join(sys.path)}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{script}:2: DeprecationWarning: some_public.Ratio is deprecated" in done.stderr
    assert "use fractions.Fraction" in done.stderr


@pytest.mark.usefixtures("public")
def test_a_deprecated_name_is_an_error_where_warnings_are() -> None:
    import some_public

    assert "Ratio" not in some_public.__all__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match=r"use fractions\.Fraction"):
            some_public.Ratio  # noqa: B018


def test_names_of_the_former_interfaces_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"use areal_core\.sdk\.RewardScore") as caught:
        assert interfaces.RewardScore is sdk.RewardScore
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError):
        interfaces.NoSuchName  # noqa: B018


def test_a_method_under_its_old_name_warns_and_is_called() -> None:
    class Counting:
        def __call__(self, completion: str) -> float:
            return 1.0

        def take_metrics(self) -> dict[str, float]:
            return {"calls": 2.0}

    with pytest.warns(DeprecationWarning, match="take_metrics is deprecated .*: call it pop_metrics"):
        rewards = RewardSum([WeightedReward("mine", Counting())])
    assert rewards.pop_metrics() == {"mine/calls": 2.0}
    with pytest.warns(DeprecationWarning, match="Old.take_metrics is deprecated"):

        class Old(FakeEngine):
            def take_metrics(self) -> dict[str, float]:
                return {"mine": 1.0}

    assert Old().pop_metrics() == {"mine": 1.0}


def test_renamed_names_of_the_former_interfaces_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"use areal_core\.launchers\.OnExit"):
        assert interfaces.EndMeans is launchers.OnExit


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, "areal_testing.fakes", "areal_testing.pytest_plugin"])
def test_importing_a_public_module_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path), "PATH": ""}, check=True)


def test_stubs_that_are_kept_by_hand_list_what_their_modules_give() -> None:
    """Modules with `from_stub` read their stub themselves."""
    names = stub_names(Path(areal_core.__file__).with_suffix(".pyi"))
    assert sorted(names) == sorted(areal_core.library.__all__)
    assert [name for name in names if getattr(areal_core, name) is not getattr(areal_core.library, name)] == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, module in stub_names(Path(interfaces.__file__).with_suffix(".pyi")).items():
            assert getattr(interfaces, name) is getattr(import_module(module), name)
