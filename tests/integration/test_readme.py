"""What the README and the docs show is run: their Python blocks together in one run, their commands one by one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_parts_that_it_shows_train_together(workplace: Workplace) -> None:
    names = []
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py): `", block)
        assert name, f"a Python block must say which file it is:\n{block}"
        (workplace.folder / name[1]).write_text(block)
        names.append(name[1])
    assert names == ["my_rewards.py", "my_advantage.py", "my_workflow.py"]
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "steps=2", "rewards=[my_rewards.py:brevity]",
        "algorithm.advantage=my_advantage.py:centred", "workflow=my_workflow.py:Twice",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["reward/brevity"] < 0


def test_the_commands_that_it_shows_are_understood(workplace: Workplace) -> None:
    """Every `areal` command of the README, with `--dry-run` where it would train; placeholders filled in."""
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("areal ")
    ]
    assert len(commands) >= 7
    for words in commands:
        if "--resume" in words or words[0] == "audit":  # needs a run; test_runs.py does these
            continue
        filled = ["model.path=model" if word == "model.path=PATH" else word for word in words]
        filled = [str(ROOT / word) if word.startswith("examples/") else word for word in filled]
        if filled[0] == "run" and "--dry-run" not in filled:
            filled += ["--dry-run"]
        if "examples/gsm8k.yaml" in " ".join(words):
            filled = ["config", "check", *[word for word in filled[1:] if word != "--dry-run"]]
        done = workplace.areal(*filled)
        assert done.code == 0, (words, done.err)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
