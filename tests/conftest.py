"""A box: a folder that is a whole environment of its own, with the core, the libraries it needs, and plugins that the
test writes as real distributions (a .dist-info folder and modules). What is installed around the test is not visible
inside, and neither is torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import areal_core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIBRARIES = ("pluggy", "packaging", "pydantic", "pydantic_core", "annotated_types", "typing_extensions")
LIBRARIES += ("typing_inspection", "yaml", "_yaml", "msgspec")


RESOLVE = """
from pathlib import Path
from areal_core.config import resolve, load_run, selections
from areal_core.errors import ArealError
try:
    resolved = resolve({config!r}, {plugins!r}, {overrides!r}, imports={imports!r})
    config = resolved.config
    {then}
except ArealError as error:
    print(type(error).__name__, error.exit_code)
    print(error)
"""


@dataclass
class Outcome:
    """What a program in the box did."""

    code: int
    out: str
    err: str


class Box:
    """Write plugins and files, then run `areal` or Python among them and nothing else."""

    def __init__(self, root: Path, libraries: Path) -> None:
        self.root = root
        self.site = root / "site"
        self.work = root / "work"
        self.libraries = libraries
        self.site.mkdir()
        self.work.mkdir()
        self.environment: dict[str, str] = {}

    def file(self, name: str, text: str) -> Path:
        """A file in the current folder of the programs."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def plugin(
        self,
        name: str,
        records: str = "",
        *,
        module: str = "",
        modules: dict[str, str] | None = None,
        distribution: str = "",
        version: str = "1.2.3",
        requires: tuple[str, ...] = ("areal-core>=0.1",),
        metadata: str = "",
        entry_point: str = "",
    ) -> None:
        """Install a plugin whose record module holds `records`; `modules` are further files of its package."""
        package = module or f"{name.replace('-', '_')}_package"
        folder = self.site / package
        folder.mkdir(exist_ok=True)
        heading = (
            "from areal_core.plugins import Command, Component, HealthCheck, Preset, hookimpl\n"
            f"import pathlib; pathlib.Path(r'{self.root}').joinpath('imported-{name}').touch()\n"
        )
        files = {"__init__.py": "", "plugin.py": heading + textwrap.dedent(records), **(modules or {})}
        for file_name, text in files.items():
            (folder / file_name).write_text(textwrap.dedent(text))
        self.distribution(
            distribution or f"areal-{name}",
            version,
            requires,
            f"{name} = {entry_point or f'{package}.plugin'}",
            metadata,
        )

    def distribution(self, name: str, version: str, requires: tuple[str, ...], entry: str, metadata: str = "") -> Path:
        """The metadata folder that makes files an installed distribution."""
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        folder.joinpath("METADATA").write_text(
            "\n".join([*lines, *textwrap.dedent(metadata).strip().splitlines()]) + "\n"
        )
        folder.joinpath("entry_points.txt").write_text(f"[areal.plugins]\n{entry}\n")
        return folder

    def imported(self, name: str) -> bool:
        """Whether the record module of a plugin has been imported since this was last asked."""
        mark = self.root / f"imported-{name}"
        found = mark.exists()
        mark.unlink(missing_ok=True)
        return found

    def python(self, code: str, **environment: str) -> Outcome:
        """Run Python code in the box."""
        return self._run(["-c", textwrap.dedent(code)], environment)

    def areal(self, *words: str, **environment: str) -> Outcome:
        """Run the command line in the box."""
        return self._run(["-m", "areal_core", *words], environment)

    def resolve(
        self,
        *overrides: str,
        config: str | None = "run.yaml",
        plugins: Sequence[str] = (),
        then: str = "print('valid')",
        imports: bool = False,
        **environment: str,
    ) -> str:
        """Resolve a config and run a statement that sees `resolved` and `config`; its output, or the error's text."""
        names = {"config": config, "plugins": list(plugins), "overrides": list(overrides)}
        code = RESOLVE.format(**names, then=then, imports=imports)
        outcome = self.python(code, **environment)
        assert not outcome.err, outcome.err
        return outcome.out

    def shown(self, expression: str, *overrides: str, **options: Any) -> str:
        """What an expression of `resolved` and `config` prints."""
        return self.resolve(*overrides, then=f"print({expression})", **options).strip()

    def _run(self, words: list[str], environment: dict[str, str]) -> Outcome:
        paths = os.pathsep.join(map(str, (self.site, self.libraries)))
        variables = {"PYTHONPATH": paths, "PATH": os.environ["PATH"], **self.environment, **environment}
        done = subprocess.run(
            [sys.executable, "-S", "-B", *words],
            cwd=self.work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,  # for hangs: what is run here takes a second to a minute
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the core and the libraries of its torch-free half, and to nothing else."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in LIBRARIES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        origin = Path(found.origin)
        target = origin.parent if found.submodule_search_locations else origin
        (folder / target.name).symlink_to(target)
    (folder / "areal_core").symlink_to(Path(areal_core.__file__).parent)
    return folder


@pytest.fixture
def box(tmp_path: Path, libraries: Path) -> Box:
    """An environment of its own for one test."""
    return Box(tmp_path, libraries)


RECORDS = """
@hookimpl
def areal_train_engines():
    return [Component("engine", "trains", target="kit_package.parts:Engine",
                      config="kit_package.settings:EngineSettings")]

@hookimpl
def areal_inference_engines():
    return [Component("generator", "generates", target="kit_package.parts:Generator",
                      config="kit_package.settings:GeneratorSettings")]

@hookimpl
def areal_algorithms():
    return [Component("policy", "learns", target="kit_package.parts:Policy",
                      config="kit_package.settings:PolicySettings")]

@hookimpl
def areal_advantages():
    return [Component("grouped", "compares siblings", target="kit_package.parts:grouped",
                      config="kit_package.settings:GroupedSettings"),
            Component("plain", "the reward itself", target="kit_package.parts:plain")]

@hookimpl
def areal_workflows():
    return [Component("single", "one turn", target="kit_package.parts:Workflow",
                      config="areal_core.config:NoSettings")]

@hookimpl
def areal_reward_functions():
    return [Component("exact", "equal or not", target="kit_package.parts:exact",
                      config="kit_package.settings:ExactSettings")]

@hookimpl
def areal_datasets():
    return [Component("rows", "a few rows", target="kit_package.parts:Rows",
                      config="kit_package.settings:RowsSettings")]

@hookimpl
def areal_launchers():
    return [Component("here", "this process", target="kit_package.parts:Workflow",
                      config="areal_core.config:NoSettings")]

@hookimpl
def areal_trackers():
    return [Component("remote", "sends metrics", target="kit_package.parts:Tracker",
                      config="kit_package.settings:TrackerSettings")]

@hookimpl
def areal_presets():
    return [Preset("small", "a small run", path="kit_package:small.yaml", default=True),
            Preset("needy", "needs others", path="kit_package:small.yaml", plugins=("hf", "mine"))]

@hookimpl
def areal_commands():
    return [Command("greet", "says hello", target="kit_package.parts:greet")]
"""

SETTINGS = """
from collections.abc import Iterable
from pathlib import Path
from pydantic import Field
from areal_core.config import Secret, Selection, Settings, component
from areal_core.interfaces import ACTOR, REFERENCE

class EngineSettings(Settings):
    learning_rate: float = Field(default=1e-5, gt=0, description="the step size")
    betas: tuple[float, float] = (0.9, 0.999)

class GeneratorSettings(Settings):
    threads: int = Field(default=1, ge=1)

class GroupedSettings(Settings):
    needs_group = True
    scale: bool = True

class PolicySettings(Settings):
    clip: float = Field(default=0.2, gt=0)
    kl: float = Field(default=0.0, ge=0)
    advantage: Selection = component("advantages", default="kit/grouped")
    extras: list[Selection] = component("advantages", default=[])
    other: Selection | None = component("advantages")

    def check(self, config):
        if self.kl and config.evaluation is None:
            yield "kl is set, and there is no evaluation"

    def needs(self, updates):
        return [ACTOR, REFERENCE] if self.kl else [ACTOR]

class ExactSettings(Settings):
    ignore_case: bool = False

class RowsSettings(Settings):
    count: int = Field(default=10, ge=1)
    name: str = "off"
    path: Path | None = None

class TrackerSettings(Settings):
    token: Secret
    url: str | None = None
"""

PARTS = """
class Engine:
    def __init__(self, settings, model): self.settings, self.model = settings, model
class Generator(Engine): ...
class Policy:
    def __init__(self, settings): self.settings = settings
class Workflow:
    def __init__(self): ...
class Rows(Policy): ...
class Tracker(Policy): ...
def grouped(batch, scale): return ("grouped", batch, scale)
def plain(batch): return ("plain", batch)
def exact(answer, ignore_case): return (answer, ignore_case)
def greet(words):
    print("hello", *words)
    return 4
"""

SMALL = """\
steps: 5
model: {path: tiny}
dataset: kit/rows
workflow: kit/single
rewards:
  - {type: kit/exact, weight: 2}
inference_engine: kit/generator
train_engine: {type: kit/engine, learning_rate: 3e-4}
algorithm: kit/policy
launcher: kit/here
"""


@pytest.fixture
def kit(box):
    """The box with the plugin `kit` in it, and `run.yaml`, a config that uses it."""
    box.plugin("kit", RECORDS, modules={"settings.py": SETTINGS, "parts.py": PARTS, "small.yaml": SMALL})
    box.file("run.yaml", SMALL)
    return box


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
