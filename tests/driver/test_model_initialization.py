"""A model that is made before a run: once, whoever asks, and who waits is told for whom."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from areal_core.config.selection import Selection
from areal_core.driver.model_initialization import prepare_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
import time
from pathlib import Path

class Slow:
    def __init__(self, name):
        self.name = name

    def prepare(self, cache):
        made = cache / self.name
        if not made.is_dir():
            (cache / f"{self.name}-begun").touch()
            while not (cache / f"{self.name}-go").exists():
                time.sleep(0.01)
            made.mkdir()
            with (cache / "made").open("a") as file:
                file.write(f"{self.name}\\n")
        return made

class Known(Slow):
    def find(self, cache):
        return cache / self.name if (cache / self.name).is_dir() else None
"""
PROGRAM = """
import sys
from pathlib import Path
from areal_core.config.selection import Selection
from areal_core.driver import model_initialization
chosen = Selection("models", sys.argv[1], {"name": sys.argv[2]})
print(model_initialization.prepare_model(chosen, Path(sys.argv[3]), lambda line: print(line, flush=True)))
"""
DEADLINE_S = 120


class Workshop:
    """A cache, and processes that make models in it."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.cache.mkdir()
        (folder / "sources.py").write_text(SOURCE)
        self.file = folder / "sources.py"
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, kind: str, name: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", PROGRAM, f"{self.file}:{kind}", name, str(self.cache)]
        self.programs.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return self.programs[-1]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.cache / name).exists():
            assert time.monotonic() < deadline, f"there is no {name}"
            time.sleep(0.01)

    def let(self, name: str) -> None:
        (self.cache / f"{name}-go").touch()


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path)
    yield made
    for program in made.programs:
        program.kill()
        program.wait()


def test_one_makes_it_and_the_other_says_for_whom_it_waits(workshop: Workshop) -> None:
    first = workshop.start("Slow", "one")
    workshop.wait_for("one-begun")
    second = workshop.start("Slow", "one")
    assert second.stdout is not None
    line = second.stdout.readline()
    assert f"waiting for process {first.pid} on " in line
    assert "which has prepared this model for" in line
    workshop.let("one")
    assert first.communicate(timeout=DEADLINE_S)[0].splitlines()[-1] == str(workshop.cache / "one")
    assert second.communicate(timeout=DEADLINE_S)[0].splitlines()[-1] == str(workshop.cache / "one")
    assert (workshop.cache / "made").read_text() == "one\n"


def test_who_is_killed_lets_go(workshop: Workshop) -> None:
    first = workshop.start("Slow", "one")
    workshop.wait_for("one-begun")
    first.kill()
    workshop.let("one")
    assert workshop.start("Slow", "one").communicate(timeout=DEADLINE_S)[0].strip() == str(workshop.cache / "one")


def test_another_model_waits_for_nobody(workshop: Workshop) -> None:
    workshop.start("Slow", "one")
    workshop.wait_for("one-begun")
    workshop.let("two")
    assert workshop.start("Slow", "two").communicate(timeout=DEADLINE_S)[0].strip() == str(workshop.cache / "two")
    assert not (workshop.cache / "one").exists()


def test_a_model_that_is_there_takes_no_lock(workshop: Workshop) -> None:
    (workshop.cache / "one").mkdir()
    said: list[str] = []
    chosen = Selection("models", f"{workshop.file}:Known", {"name": "one"})
    assert prepare_model(chosen, workshop.cache, said.append) == workshop.cache / "one"
    assert said == []
    assert list(workshop.cache.glob(".preparing*")) == []
