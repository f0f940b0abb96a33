"""What the README and the docs show is run: their Python blocks together in one run, their commands one by one."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "get-started.md").read_text()
TURNS = (ROOT / "docs" / "guides" / "multi-turn.md").read_text()
PRESET = "grpo/addition"  # in the place of my.yaml


def blocks(text: str, language: str) -> list[str]:
    """A page's code blocks of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def line(text: str, start: str) -> str:
    """The one command of a page that begins so."""
    (found,) = [line for block in blocks(text, "") for line in block.splitlines() if line.startswith(start)]
    return found


def commands(text: str) -> list[list[str]]:
    """Every `areal` command of a page, in words."""
    lines = [line for block in blocks(text, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("areal ")]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_parts_that_it_shows_train_together(workplace: Workplace) -> None:
    """The README's reward and advantage, as its command names them, and the workflow of docs/guides/multi-turn.md."""
    (shown,) = blocks(README, "python")
    assert shown.startswith("# my.py\n")
    (workplace.folder / "my.py").write_text(shown)
    (twice,) = [block for block in blocks(TURNS, "python") if block.startswith("# my_workflow.py\n")]
    (workplace.folder / "my_workflow.py").write_text(twice)
    (words,) = [words for words in commands(README) if any("my.py" in word for word in words)]
    named = [word for word in words if "my.py" in word]
    assert len(named) == 2
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2", *named, "workflow=my_workflow.py:Twice")
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["reward/score"] < 1


@pytest.mark.parametrize(
    ("page", "least"), [(README, 5), pytest.param(START, 9, marks=pytest.mark.nightly)], ids=["README", "get-started"]
)
def test_the_commands_that_it_shows_are_understood(workplace: Workplace, page: str, least: int) -> None:
    """Every `areal` command of the page, with `--dry-run` where it would train; placeholders filled in."""
    (workplace.folder / "my.py").write_text(blocks(README, "python")[0])
    found = commands(page)
    assert len(found) >= least
    for words in found:
        if "--resume" in words or words[0] == "audit":  # needs a run; test_runs.py does these
            continue
        filled = [PRESET if word == "my.yaml" else word for word in words]
        filled = ["model.path=model" if word == "model.path=PATH" else word for word in filled]
        filled = [str(ROOT / word) if word.startswith("examples/") else word for word in filled]
        if filled[0] in {"run", "slurm"} and "--dry-run" not in filled:
            filled += ["--dry-run"]
        if "examples/gsm8k.yaml" in " ".join(words):
            filled = ["config", "check", *[word for word in filled[1:] if word != "--dry-run"]]
        done = workplace.areal(*filled)
        assert done.code == 0, (words, done.err)


@pytest.mark.nightly
def test_the_line_for_torchrun_is_a_node_of_a_run(workplace: Workplace) -> None:
    """One machine in the place of two, and a short run."""
    here = {"2": "1", "RANK": "0", "HOST": "127.0.0.1"}
    words = [word for word in shlex.split(line(README, "torchrun ")) if not word.startswith("placement=")]
    words = [re.sub(r"(?<=^--)(.*)=(.*)$", lambda m: f"{m[1]}={here[m[2]]}", word) for word in words]
    assert words.count("RUN_DIR") == 1
    assert words.count("my.yaml") == 1
    words = [{"RUN_DIR": "run", "my.yaml": "run.yaml"}.get(word, word) for word in words]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        [scripts / "torchrun", f"--master-port={port}", *words[1:], "steps=1"], cwd=workplace.folder, text=True,
        env={**workplace.environment, "PATH": f"{scripts}:{os.environ['PATH']}"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(workplace.metrics()) == 1


def test_the_install_line_has_all_that_the_demonstration_needs() -> None:
    """The plugins of its preset and of the run that makes its model, and what these rest on."""
    (names,) = re.findall(r"areal_\{([a-z,]+)\}", line(README, "pip install -c constraints.txt . "))
    presets = ROOT / "plugins" / "areal_grpo" / "src" / "areal_grpo" / "presets"
    needed: set[str] = set()
    for name in ("addition.yaml", "addition_lessons.yaml"):
        needed |= set(yaml.safe_load((presets / name).read_text())["plugins"])
    for name in sorted(needed):
        project = tomllib.loads((ROOT / "plugins" / f"areal_{name}" / "pyproject.toml").read_text())["project"]
        needed |= set(re.findall(r"areal-(\w+)", " ".join(project["dependencies"]))) - {"core"}
    assert set(names.split(",")) >= needed
