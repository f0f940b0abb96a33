"""The folder to copy: built, installed into a fresh environment as a stranger would, tested and trained with there."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
NEEDED = ("hf", "vision", "fsdp", "grpo", "testing")
DISTRIBUTIONS = (ROOT, *(ROOT / "plugins" / f"areal_{name}" for name in NEEDED), PLUGIN)
MODEL = ("model.source=null", "model.path=model")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "tests", ".mypy_cache")


class Environment:
    """A virtual environment with areal and the example as wheels; everything else comes from the current one."""

    def __init__(self, folder: Path) -> None:
        wheels = folder / "wheels"
        for source in DISTRIBUTIONS:
            # Built from a copy: a build must not leave anything in a checkout in which others work.
            copy = folder / "sources" / source.name
            shutil.copytree(source, copy, ignore=LEFT_OUT)
            self._pip(sys.executable, "wheel", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy))
        venv.create(folder / "environment", with_pip=False)
        self.python = folder / "environment" / "bin" / "python"
        packages = next((folder / "environment" / "lib").glob("python*")) / "site-packages"
        # Paths of a .pth file are searched last and their own .pth files, those of editable installs, are not read.
        (packages / "surroundings.pth").write_text("\n".join(site.getsitepackages()))
        target = ("install", "--no-index", "--target", str(packages))
        self._pip(sys.executable, *target, *map(str, sorted(wheels.glob("*.whl"))))
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(("AREAL_", "PYTHON"))}
        self.variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AREAL_CACHE": str(folder / "cache")}

    @staticmethod
    def _pip(python: str, command: str, *words: str) -> None:
        line = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", command, "--no-deps", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run Python there with these words, in a folder outside the checkout."""
        line = [str(self.python), *words]
        return subprocess.run(
            line, cwd=folder, env=self.variables, capture_output=True, text=True, check=False, timeout=900
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Made once; no test changes it."""
    return Environment(tmp_path_factory.mktemp("example"))


def test_areal_shows_what_the_plugin_supplies(environment: Environment, tmp_path: Path) -> None:
    where = environment.run("-c", "import areal_core, areal_example; print(areal_core.__file__)", folder=tmp_path)
    assert str(environment.python.parents[1]) in where.stdout, "the checkout is used instead of the wheel"
    done = environment.run("-m", "areal_core", "plugins", "example", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "areal-example 0.1.0" in done.stdout
    components = ("brevity", "doublings", "self_check", "better_or_worse", "capped_reinforce", "better")
    for name in (*components, "areal_run_finished"):
        assert name in done.stdout, f"{name} is missing in:\n{done.stdout}"


def test_the_plugin_passes_its_own_tests(environment: Environment, tmp_path: Path) -> None:
    shutil.copytree(PLUGIN / "tests", tmp_path / "tests")
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.nightly
def test_a_run_trains_with_the_plugin(environment: Environment, tmp_path: Path) -> None:
    shutil.copy(PLUGIN / "run.yaml", tmp_path)
    make = "from pathlib import Path; from areal_grpo.demonstration.model import make_model; "
    made = environment.run("-c", f"{make} make_model(Path('model'), hidden=32, layers=1, heads=2)", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    done = environment.run("-m", "areal_core", "run", "run.yaml", *MODEL, "run_dir=run", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    run = tmp_path / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3
    assert "reward/brevity" in (run / "metrics.jsonl").read_text()
    assert (run / "outcome.txt").read_text() == "done\n", "the event hook was not told of the end"
    assert "areal-example" in (run / "plugins.json").read_text()
