"""Wheels as wheels: built once, installed from local files into fresh environments outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import areal_core

if TYPE_CHECKING:
    from collections.abc import Callable

    Install = Callable[..., "Environment"]

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.name for path in (ROOT / "plugins").glob("areal_*"))


LIBRARIES = {"areal_deepspeed": ["areal_fsdp"]}
"""What plugins require beside the core; extras are left out, areal_vision among them."""
SOME = {"areal_grpo", "areal_rewards", "areal_vllm"}
"""One of algorithms, one of extras, one of servers; the others alone with the core are `long`."""


class Environment:
    """A virtual environment with some of areal's wheels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def areal(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run its `areal` in an empty folder."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(self.folder)}
        return subprocess.run(
            [str(self.folder / "bin" / "areal"), *words],
            cwd=work, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every wheel of the repository, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT, *(ROOT / "plugins" / name for name in PLUGINS), ROOT / "examples" / "plugin"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), *map(str, sources)], check=True)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Install:
    """Makes an environment with some of the wheels; libraries of others are there, areal's editable installs not."""
    libraries = tmp_path_factory.mktemp("libraries")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("areal", "_areal", "__editable__", "_virtualenv", "distutils-precedence")):
            (libraries / path.name).symlink_to(path)

    def make(*names: str) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site = next(folder.glob("lib/python*/site-packages"))
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet",
             "--no-deps", "--no-index", *(str(wheels[name]) for name in names)],
            check=True,
        )  # fmt: skip
        (site / "libraries.pth").write_text(f"{libraries}\n")
        return Environment(folder)

    return make


def test_the_core_alone_says_what_is_missing(install: Install) -> None:
    core = install("areal_core")
    assert core.areal("--version").stdout.split()[-1] == areal_core.__version__
    assert core.areal("plugins").returncode == 0
    refused = core.areal("run", "--plugins", "grpo")
    assert refused.returncode == 2
    assert "pip install ./plugins/areal_grpo" in refused.stderr


def test_the_core_alone_has_the_plugin_to_begin_with(install: Install) -> None:
    core = install("areal_core")
    begun = core.areal("new-plugin", "shortest", "--kind", "dataset")
    assert begun.returncode == 0, begun.stderr
    assert (core.folder / "work/areal-shortest/src/areal_shortest/datasets.py").is_file()
    assert (core.folder / "work/areal-shortest/.github/workflows/ci.yml").is_file()


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.nightly)
        for name in PLUGINS
        if "areal.plugins" in (ROOT / "plugins" / name / "pyproject.toml").read_text()  # else a library alone
    ],
)
def test_the_core_and_one_plugin(install: Install, plugin: str) -> None:
    both = install("areal_core", *LIBRARIES.get(plugin, ()), plugin)
    shown = both.areal("plugins", plugin.removeprefix("areal_"))
    assert shown.returncode == 0, shown.stderr
    assert plugin.replace("_", "-") in shown.stdout
    refused = both.areal("run", "--plugins", plugin.removeprefix("areal_"))
    assert refused.returncode == 2
    if plugin == "areal_grpo":  # its default preset names the others: all of them are asked for in one line
        assert "pip install" in refused.stderr
        assert "areal_fsdp" in refused.stderr
        assert "areal_hf" in refused.stderr


def test_all_together_and_a_third_partys_train(install: Install, lay_out: Callable[[Path], None]) -> None:
    """But for areal_vision, which text does not need."""
    everything = install("areal_core", *(name for name in PLUGINS if name != "areal_vision"), "areal_example")
    work = everything.folder / "work"
    work.mkdir()
    lay_out(work)
    listed = everything.areal("plugins")
    assert "example" in listed.stdout
    done = everything.areal("run", "run.yaml", "run_dir=run", "steps=1")
    assert done.returncode == 0, done.stderr
    assert (work / "run" / "model" / "config.json").is_file()
